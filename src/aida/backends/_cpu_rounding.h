/* Rounding to fewer bits: rounding.py, in integers and without branches, so that the loops vectorise. Also what the
 * loops of _cpu_low.h share.
 *
 * `bits` are 16 random bits. A number is rounded up if they and the part that is cut off add up to 1 or more.
 */

#include <stdint.h>

#define ROUNDS 7 /* of the random generator */
#define AHEAD 4  /* blocks */

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

/* The code of x * inverse, which is at most 448 if it is finite; `inverse` is that of the block's scale. With 2**-6 added
 * the digits of a subnormal number are where those of a normal one are. */
static inline INLINE uint8_t to_fp8_by(float x, float inverse, uint32_t bits)
{
    const float scaled = of_bits(bits_of(x) & 0x7fffffff) * inverse;
    const int32_t magnitude = (int32_t)bits_of(scaled), nan = 0x43f00000; /* 480 */
    const int32_t normal = magnitude < nan ? magnitude : nan;
    const int32_t subnormal = (int32_t)bits_of(scaled + 0x1p-6f) - (1 << 23);
    const uint32_t digits = (uint32_t)(magnitude < 121 << 23 ? subnormal : normal);
    return (uint8_t)((bits_of(x) >> 24 & 0x80) | (((digits + (bits << 4)) >> 20) - 960));
}

/* The bits of a magnitude, which are in the order of the numbers. */
static inline INLINE int32_t magnitude_of(float x)
{
    return (int32_t)(bits_of(x) & 0x7fffffff);
}

#define LARGEST 0x7f7fffff /* the magnitude of the largest finite number */

static int32_t largest_finite(const float *x, int count)
{
    int32_t largest = 0;
    for (int i = 0; i < count; i++) {
        const int32_t magnitude = magnitude_of(x[i]);
        if (magnitude <= LARGEST && magnitude > largest)
            largest = magnitude;
    }
    return largest;
}

/* The smallest power of two that fits the largest magnitude of a block, as its exponent plus 127. 448 is 1.75 * 2**8:
 * the addition carries into the exponent if the mantissa is above 1.75. */
static uint8_t scale_of(int32_t largest)
{
    const int32_t scale = ((largest + 0x1fffff) >> 23) - 8;
    return (uint8_t)(scale < 1 ? 1 : scale);
}

static const uint64_t numbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};

/* storage.Stream.positions */
static inline INLINE uint64_t position_of(const int64_t *stream, int64_t i)
{
    return (uint64_t)(stream[FIRST] + i / stream[RUN] * stream[STRIDE] + i % stream[RUN]);
}

static inline INLINE void prefetch_bytes(const void *at, int64_t block)
{
    for (int64_t byte = AHEAD * block; byte < (AHEAD + 1) * block; byte += 64)
        __builtin_prefetch((const char *)at + byte);
}

/* Fetch what a later block reads. The processor's own prefetching is too late: without this, updates of 8-bit state
 * that is not in the cache took 1.5 times as long. */
static inline INLINE void prefetch(const struct stretch *at)
{
    const int64_t param = BLOCK * bytes[at->job->storage].param, state = BLOCK * state_bytes(at->job);
    prefetch_bytes(at->param, param);
    prefetch_bytes(at->grad, param);
    prefetch_bytes(at->exp_avg, state);
    prefetch_bytes(at->exp_avg_var, state);
    if (at->compensation)
        prefetch_bytes(at->compensation, param);
}
