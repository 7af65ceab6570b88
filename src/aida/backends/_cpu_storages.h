/* The kernels of one instruction set, for all storage types. _cpu.c defines TARGET, LEVEL, WIDTH and MULTIPLY. */

#define STORED double
#define REAL double
#define ROOT __builtin_sqrt
#define LOAD
#define STORE
#define NAME(x) LEVEL(x##_float64)
#include "_cpu_kernels.h"
#undef STORED
#undef REAL
#undef ROOT
#undef LOAD
#undef STORE
#undef NAME

#define REAL float
#define ROOT __builtin_sqrtf

#define STORED float
#define LOAD
#define STORE
#define NAME(x) LEVEL(x##_float32)
#include "_cpu_kernels.h"
#undef STORED
#undef LOAD
#undef STORE
#undef NAME

#define STORED uint16_t

#define LOAD from_bfloat16
#define STORE to_bfloat16
#define NAME(x) LEVEL(x##_bfloat16)
#include "_cpu_kernels.h"
#undef LOAD
#undef STORE
#undef NAME

#define LOAD from_float16
#define STORE to_float16
#define NAME(x) LEVEL(x##_float16)
#include "_cpu_kernels.h"
#undef LOAD
#undef STORE
#undef NAME

#undef STORED
#undef REAL
#undef ROOT

#include "_cpu_low.h"

#define KERNELS(storage) {LEVEL(gram_##storage), LEVEL(update_##storage)}
static const struct kernels LEVEL(kernels)[STORAGES + 1] = {
    [FLOAT64] = KERNELS(float64),
    [FLOAT32] = KERNELS(float32),
    [BFLOAT16] = KERNELS(bfloat16),
    [FLOAT16] = KERNELS(float16),
    [LOW] = KERNELS(low),
};
#undef KERNELS
