/* Conversion of bf16 and fp16 to and from float32.
 *
 * The code uses integers and no branches: it computes every case and selects one, so that the loops vectorise on every
 * processor, with or without half-precision instructions.
 */

#include <stdint.h>
#include <string.h>

static inline INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline INLINE float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline INLINE float from_bfloat16(uint16_t stored)
{
    return of_bits((uint32_t)stored << 16);
}

static inline INLINE uint16_t to_bfloat16(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t nearest_even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet_nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : nearest_even);
}

/* A subnormal is converted from an integer. Its bits as a float32 would be subnormal too, and become zero under
 * torch.set_flush_denormal(True). */
static inline INLINE float from_float16(uint16_t stored)
{
    const uint32_t sign = (uint32_t)(stored & 0x8000) << 16;
    const uint32_t magnitude = stored & 0x7fff;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = magnitude << 13 | 0x7f800000;
    const uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t at_least_normal = magnitude >= 0x7c00 ? special : normal;
    return of_bits(sign | (magnitude < 0x400 ? subnormal : at_least_normal));
}

static inline INLINE uint16_t to_float16(float x)
{
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const uint32_t magnitude = bits_of(x) & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    /* 0.5f has the last place of a float16 subnormal, so the addition rounds correctly */
    const uint32_t subnormal = bits_of(of_bits(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t below_special = magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)(sign | (magnitude >= 0x477ff000 ? special : below_special));
}
