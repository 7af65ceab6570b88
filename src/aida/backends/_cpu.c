/* The fused update on a CPU: reduce -> scalars -> apply over a whole batch, in two calls or in one.
 *
 * Plain C, loaded by ctypes, without Python.h: one build serves every Python version.
 *
 * A tensor is cut into chunks of fixed size, and the sums of its chunks are added in order. So the result does not
 * depend on the number of threads or on which thread did what.
 */

#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

#include "_cpu_halves.h"
#include "_cpu_job.h"
#include "_cpu_rounding.h"
#include "_cpu_rule.h"
#include "_cpu_tensors.h"

/* A block is the chunks that a thread takes at a time: at most as many as fill a 1 MiB cache with gradients and first
 * moments. With half as many, a step of ResNet34 on two cores takes 5 % longer; with a quarter, 15 %. */
#define WIDEST 32

/* Minimum number of blocks per thread: few enough to be cheap, enough for all threads to finish together. */
#define TURNS 8

/* Up to this many elements one thread does all the work, as in torch. */
#define FEW 32768

/* Everything that a loop over elements needs besides the elements. */
struct coefficients {
    double scale; /* of the raw gradient */
    double l2;
    double lerp_weight; /* m <- m + weight * (g - m), or g + weight * (g - m) */
    int lerp_from_grad;
    double residual_m, residual_g;
    double beta2, eps;
    double eps_share; /* what eps has added to v, if v is stored without it; eps is 0 then */
    double stepsize;
    double scaled_decay; /* lr times decoupled weight decay */
};

/* -- the loops over elements, for every storage type and instruction set -------------------------------------- */

struct kernels {
    void (*gram)(const struct stretch *, const struct coefficients *, double *, int);
    void (*update)(const struct stretch *, const struct coefficients *);
};

#define TARGET
#define LEVEL(x) x##_any
#define WIDTH 16
#define WIDEN(x) __builtin_convertvector(x, doubles_any)
#if defined(__x86_64__)
#define MULTIPLY(a, b) (wide_any) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#elif defined(__aarch64__)
#define MULTIPLY(a, b) (wide_any) vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b)))
#else
#define MULTIPLY(a, b) ((a) & 0xffffffff) * (b)
#endif
#include "_cpu_storages.h"
#undef TARGET
#undef LEVEL
#undef WIDTH
#undef WIDEN
#undef MULTIPLY

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
#define LEVEL(x) x##_avx2
#define WIDTH 32
#define WIDEN(x) (doubles_avx2) _mm256_cvtps_pd((__m128)(x))
#define MULTIPLY(a, b) (wide_avx2) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#include "_cpu_storages.h"
#undef TARGET
#undef LEVEL
#undef WIDTH
#undef WIDEN
#undef MULTIPLY

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define LEVEL(x) x##_avx512
#define WIDTH 64
#define WIDEN(x) (doubles_avx512) _mm512_cvtps_pd((__m256)(x))
#define MULTIPLY(a, b) (wide_avx512) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#include "_cpu_storages.h"
#undef TARGET
#undef LEVEL
#undef WIDTH
#undef WIDEN
#undef MULTIPLY
#endif

static const struct kernels *kernels_of(const struct job *job)
{
    const int64_t kind = is_full(job) ? job->storage : LOW;
#if defined(__x86_64__)
    if (job->level == 2)
        return &kernels_avx512[kind];
    if (job->level == 1)
        return &kernels_avx2[kind];
#endif
    return &kernels_any[kind];
}

/* -- scalars -------------------------------------------------------------------------------------------------- */

static int may_change(const struct job *job, int64_t tensor, const double *value)
{
    return !value[SKIP] || job->finite[tensor];
}

/* The coefficients of the moments. Except for clipping they are known before the reduction. */
static void begin_coefficients(const struct job *job, const double *value, struct coefficients *c)
{
    const double rest = 1 - value[BETA1];
    c->scale = value[SIGN] / job->grad_scale;
    c->l2 = value[L2];
    /* the two forms of torch.lerp: start from the nearer end, so that beta1 = 0 gives exactly the gradient */
    c->lerp_from_grad = rest >= 0.5;
    c->lerp_weight = c->lerp_from_grad ? -value[BETA1] : rest;
}

static void finish_coefficients(const struct job *job, int64_t tensor, const double *value, struct coefficients *c)
{
    const double step = (double)*counter_of(job, STEP, tensor) + 1;
    const int clips = value[CLIP_NORM] != 0;
    if (clips)
        c->scale *= clip_coefficient(job->squared_norm, value[CLIP_NORM]);
    const double *sums = job->sums + SUMS * tensor;
    const struct products products = clips ? rescaled_products(sums, c->scale, value[BETA1], value[L2])
                                     : job->storage == FLOAT64
                                         ? (struct products){.dot = sums[MG], .mm = sums[MM], .gg = sums[GG]}
                                         : rescaled_products(sums, 1, value[BETA1], 0);
    residual_coefficients(products, (int64_t)value[PROJECTIONS], value[XI], &c->residual_m, &c->residual_g);
    c->beta2 = value[BETA2];
    const int without_eps = job->state == FP8_STATE;
    c->eps = without_eps ? 0 : value[EPS];
    c->eps_share = without_eps ? value[EPS] * bias_correction(value[BETA2], step) / (1 - value[BETA2]) : 0;
    c->stepsize = value[LR] * sqrt(bias_correction(value[BETA2], step)) / bias_correction(value[BETA1], step);
    c->scaled_decay = value[LR] * value[DECAY];
}

/* -- the phases ----------------------------------------------------------------------------------------------- */

static void reduce_chunks(const struct job *job, int64_t first, int64_t last)
{
    const struct kernels *kernels = kernels_of(job);
    for (int64_t chunk = first; chunk < last; chunk++) {
        const int64_t tensor = find(job->first_chunk, job->tensors, chunk);
        const double *value = values_of(job, tensor);
        const struct stretch at = stretch_of(job, tensor, chunk);
        struct coefficients c;
        begin_coefficients(job, value, &c);
        kernels->gram(&at, &c, job->partial + SUMS * chunk, value[CLIP_NORM] != 0);
    }
}

/* The largest number of the state's dtype. */
static const double largest[STORAGES] = {
    [FLOAT64] = DBL_MAX, [FLOAT32] = FLT_MAX, [BFLOAT16] = FLT_MAX, [FLOAT16] = FLT_MAX};

static void sum_chunks(const struct job *job, int64_t tensor)
{
    const int clips = values_of(job, tensor)[CLIP_NORM] != 0;
    for (int64_t chunk = job->first_chunk[tensor]; chunk < job->first_chunk[tensor + 1]; chunk++)
        for (int64_t column = 0; column < SUMS; column++)
            job->sums[SUMS * tensor + column] += job->partial[SUMS * chunk + column];
    /* rule.is_usable: without clipping the squares must fit into the second moment. False for NaN. */
    job->finite[tensor] = job->sums[SUMS * tensor + GG] <= (clips ? DBL_MAX : largest[job->storage]);
}

static void apply_chunks(const struct job *job, int64_t first, int64_t last)
{
    const struct kernels *kernels = kernels_of(job);
    int64_t known = -1;
    int change = 0;
    struct coefficients c;
    for (int64_t chunk = first; chunk < last; chunk++) { /* in reverse order a step takes 10 % longer */
        const int64_t tensor = find(job->first_chunk, job->tensors, chunk);
        if (tensor != known) {
            const double *value = values_of(job, tensor);
            known = tensor;
            change = may_change(job, tensor, value);
            begin_coefficients(job, value, &c);
            finish_coefficients(job, tensor, value, &c);
        }
        if (change) {
            const struct stretch at = stretch_of(job, tensor, chunk);
            kernels->update(&at, &c);
        }
    }
}

/* Count the step or the skipped step of every tensor, after all chunks, because their coefficients read the step. */
static void advance(const struct job *job)
{
    for (int64_t tensor = 0; tensor < job->tensors; tensor++)
        *counter_of(job, may_change(job, tensor, values_of(job, tensor)) ? STEP : SKIPPED, tensor) += 1;
}

/* -- the threads ---------------------------------------------------------------------------------------------- */

enum { UNTOUCHED, REDUCED, APPLIED };

/* Progress of all threads. Blocks are reduced in order; a block can be applied once all its tensors are reduced. */
struct progress {
    int64_t chunks; /* in total */
    int64_t width;  /* chunks per block */
    int64_t blocks;
    int64_t to_reduce; /* the next block to reduce */
    int64_t reduced;   /* all blocks before this one are reduced */
    int64_t summed;    /* all tensors before this one have their sums */
    int64_t ready;     /* all blocks before this one can be applied */
    int64_t to_apply;  /* all blocks before this one are applied or being applied */
    int64_t end;       /* number of blocks to apply in this call: all or none */
};

/* The blocks that a thread may apply, from high to low, because the last reduced ones are most likely in its cache.
 * When it reaches low, the next window is what has become ready since. */
struct window {
    int64_t low, at, high;
};

enum task { FINISHED, WAIT, REDUCE, APPLY };

/* What a thread does next. It first applies the blocks that it reduced itself, because they are in its cache: when
 * blocks came from another core's cache, a step of ResNet34 on two cores took 18 ms instead of 12. It never waits while
 * there is work, so a thread that loses its core to another process delays no other thread: beside two or three busy
 * processes a step took 50 ms, and 178 ms with barriers between the phases. */
static enum task next_task(const struct job *job, struct progress *now, int32_t thread, struct window *own,
                           int64_t *block)
{
    if (own->at == own->low) {
        own->low = own->high;
        own->at = own->high = now->ready;
    }
    while (own->at > own->low && (job->owner[own->at - 1] != thread || job->stage[own->at - 1] == APPLIED))
        own->at--;
    if (own->at > own->low) {
        *block = --own->at;
        job->stage[*block] = APPLIED;
        return APPLY;
    }
    if (now->to_reduce < now->blocks) {
        *block = now->to_reduce++;
        job->owner[*block] = thread;
        return REDUCE;
    }
    while (now->to_apply < now->ready && job->stage[now->to_apply] == APPLIED)
        now->to_apply++;
    if (now->to_apply < now->ready) {
        *block = now->to_apply;
        job->stage[*block] = APPLIED;
        return APPLY;
    }
    return now->ready < now->end ? WAIT : FINISHED;
}

static int64_t chunks_before(const struct progress *now, int64_t block)
{
    return block < now->blocks ? block * now->width : now->chunks;
}

static void note_reduced(const struct job *job, struct progress *now, int64_t block)
{
    job->stage[block] = REDUCED;
    while (now->reduced < now->blocks && job->stage[now->reduced] != UNTOUCHED)
        now->reduced++;
    while (now->summed < job->tensors && job->first_chunk[now->summed + 1] <= chunks_before(now, now->reduced))
        sum_chunks(job, now->summed++);
    if (now->end != 0)
        now->ready = now->summed == job->tensors ? now->blocks : job->first_chunk[now->summed] / now->width;
}

static struct progress start(const struct job *job, int reduce, int apply)
{
    struct progress now = {.chunks = job->first_chunk[job->tensors]};
    now.width = now.chunks / (TURNS * job->threads);
    now.width = now.width < 1 ? 1 : now.width > WIDEST ? WIDEST : now.width;
    now.blocks = (now.chunks + now.width - 1) / now.width;
    now.end = apply ? now.blocks : 0;
    memset(job->stage, reduce ? UNTOUCHED : REDUCED, (size_t)now.blocks);
    if (reduce) {
        memset(job->sums, 0, (size_t)job->tensors * SUMS * sizeof *job->sums);
        memset(job->finite, 1, (size_t)job->tensors);
    } else {
        now.to_reduce = now.ready = now.blocks;
    }
    return now;
}

/* Reduce all blocks, apply all blocks, or both, on torch's OpenMP threads. */
static void run(const struct job *job, int reduce, int apply)
{
    struct progress now = start(job, reduce, apply);
#pragma omp parallel num_threads((int)job->threads) if (job->elements > FEW)
    {
#ifdef _OPENMP
        const int32_t thread = omp_get_thread_num();
#else
        const int32_t thread = 0;
#endif
        enum task task;
        struct window own = {0, 0, 0};
        int64_t block = 0;
        do {
#pragma omp critical(aida)
            task = next_task(job, &now, thread, &own, &block);
            if (task == APPLY) {
                apply_chunks(job, chunks_before(&now, block), chunks_before(&now, block + 1));
            } else if (task == REDUCE) {
                reduce_chunks(job, chunks_before(&now, block), chunks_before(&now, block + 1));
#pragma omp critical(aida)
                note_reduced(job, &now, block);
            } else if (task == WAIT) {
                sched_yield();
            }
        } while (task != FINISHED);
    }
}

/* -- exported to library.py ----------------------------------------------------------------------------------- */

EXPORT int64_t aida_chunk(void)
{
    return CHUNK;
}

EXPORT int64_t aida_job_bytes(void)
{
    return sizeof(struct job);
}

EXPORT int64_t aida_value_columns(void)
{
    return COLUMNS;
}

/* Describe `count` tensors; returns how many could be read. Needs the GIL. */
EXPORT int64_t aida_describe(const struct exchange *api, void *const *objects, int64_t count, uint64_t *addresses,
                             uint64_t *forms)
{
    for (int64_t i = 0; i < count; i++)
        if (!describe(api, objects[i], addresses + i, forms + i))
            return i;
    return count;
}

EXPORT int64_t aida_levels(void)
{
    int64_t levels = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    levels += __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    levels += levels == 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
#endif
    return levels;
}

/* Phase one: the sums of every tensor, and the squared norm of the gradients that are clipped. */
EXPORT void aida_reduce(struct job *job)
{
    run(job, 1, 0);
    job->squared_norm = 0;
    for (int64_t tensor = 0; tensor < job->tensors; tensor++) {
        const double *value = values_of(job, tensor);
        if (value[CLIP_NORM] != 0 && may_change(job, tensor, value))
            job->squared_norm += job->sums[SUMS * tensor + GG] / (job->grad_scale * job->grad_scale);
    }
}

/* Phase two: new moments and parameters from the sums. */
EXPORT void aida_apply(struct job *job)
{
    run(job, 0, 1);
    advance(job);
}

/* Both phases in one call. */
EXPORT void aida_step(struct job *job)
{
    run(job, 1, 1);
    advance(job);
}
