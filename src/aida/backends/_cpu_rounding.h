/* Rounding to fewer bits: rounding.py, in integers and without branches, so that the loops vectorise.
 *
 * `bits` are 16 random bits. A number is rounded up if they and the part that is cut off add up to 1 or more.
 */

#include <stdint.h>

#define ROUNDS 7 /* of the random generator */

static inline INLINE uint16_t to_bfloat16_by(float x, uint32_t bits)
{
    const int32_t magnitude = (int32_t)(bits_of(x) & 0x7fffffff);
    return magnitude >= 0x7f800000 ? to_bfloat16(x) : (uint16_t)((bits_of(x) + bits) >> 16);
}

static inline INLINE uint16_t to_float16_by(float x, uint32_t bits)
{
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const int32_t magnitude = (int32_t)(bits_of(x) & 0x7fffffff);
    const int small = magnitude < 0x38800000; /* 2**-14 */
    const uint32_t normal = (((uint32_t)magnitude - (112u << 23)) << 3) + bits;
    const uint32_t subnormal = (uint32_t)(int32_t)((small ? of_bits((uint32_t)magnitude) : 0) * 0x1p40f) + bits;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (magnitude >= 0x47800000 ? special : (small ? subnormal : normal) >> 16));
}

/* The e4m3 number of a code. */
static inline INLINE float from_fp8(uint8_t code)
{
    const int32_t magnitude = code & 0x7f;
    const uint32_t normal = ((uint32_t)magnitude << 20) + (120u << 23);
    const uint32_t subnormal = bits_of((float)magnitude * 0x1p-9f);
    const uint32_t finite = magnitude < 8 ? subnormal : normal;
    return of_bits((uint32_t)(code & 0x80) << 24 | (magnitude == 0x7f ? 0x7fc00000 : finite));
}

/* The code of x * inverse, which is at most 448 if it is finite; `inverse` is that of the block's scale. */
static inline INLINE uint8_t to_fp8_by(float x, float inverse, uint32_t bits)
{
    const float scaled = of_bits(bits_of(x) & 0x7fffffff) * inverse;
    const int32_t magnitude = (int32_t)bits_of(scaled);
    const int small = magnitude < 121 << 23; /* 2**-6 */
    const uint32_t normal = (((uint32_t)magnitude + (bits << 4)) >> 20) - 960;
    const uint32_t subnormal = ((uint32_t)(int32_t)((small ? scaled : 0) * 0x1p25f) + bits) >> 16;
    const uint32_t finite = small ? subnormal : normal;
    return (uint8_t)((bits_of(x) >> 24 & 0x80) | (magnitude >= 0x7f800000 ? 0x7f : finite));
}

/* Bits of a float that count for the scale of its block; they are in the order of the magnitudes. */
static inline INLINE int32_t finite_magnitude(float x)
{
    const int32_t magnitude = (int32_t)(bits_of(x) & 0x7fffffff);
    return magnitude < 0x7f800000 ? magnitude : 0;
}

/* The smallest power of two that fits the largest magnitude of a block, as its exponent plus 127. 448 is 1.75 * 2**8:
 * the addition carries into the exponent if the mantissa is above 1.75. */
static inline INLINE uint8_t scale_of(int32_t largest)
{
    const int32_t scale = ((largest + 0x1fffff) >> 23) - 8;
    return (uint8_t)(scale < 1 ? 1 : scale);
}
