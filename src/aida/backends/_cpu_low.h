/* The two loops over elements for batches that are stored in fewer bits. _cpu.c includes this file once per
 * instruction set, with these macros:
 *
 *   LEVEL(x)   the function's name for this instruction set
 *   TARGET     the function attribute that selects it
 *   WIDTH      bytes of a vector register
 *   MULTIPLY   the products of the low halves of 64-bit integers in two registers
 *
 * A chunk is worked through in blocks of 128 elements, which are read into floats on the stack, updated, and rounded.
 * So formats are branches per block. The compiler must not contract a * b + c, or each instruction set would round to
 * other codes.
 */

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

typedef uint64_t LEVEL(wide) __attribute__((vector_size(WIDTH)));
typedef double LEVEL(doubles) __attribute__((vector_size(WIDTH)));
typedef float LEVEL(floats) __attribute__((vector_size(WIDTH / 2)));

/* -- one block in memory -------------------------------------------------------------------------------------- */

static TARGET void LEVEL(read)(float *restrict out, const void *stored, int64_t storage)
{
    const uint16_t *restrict halves = stored;
    if (storage == BFLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            out[i] = from_bfloat16(halves[i]);
    } else if (storage == FLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            out[i] = from_float16(halves[i]);
    } else {
        memcpy(out, stored, BLOCK * sizeof *out);
    }
}

static TARGET void LEVEL(write)(void *stored, const float *restrict x, int64_t storage)
{
    uint16_t *restrict halves = stored;
    if (storage == BFLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            halves[i] = to_bfloat16(x[i]);
    } else if (storage == FLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            halves[i] = to_float16(x[i]);
    } else {
        memcpy(stored, x, BLOCK * sizeof *x);
    }
}

/* 16 of 32 random bits per element are used, from bit `shift` on. */
static TARGET void LEVEL(write_by)(void *stored, const float *restrict x, int64_t storage,
                                                 const uint32_t *restrict words, int shift)
{
    uint16_t *restrict halves = stored;
    if (storage == BFLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            halves[i] = to_bfloat16_by(x[i], words[i] >> shift & 0xffff);
    } else {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            halves[i] = to_float16_by(x[i], words[i] >> shift & 0xffff);
    }
}

static TARGET void LEVEL(read_fp8)(float *restrict out, const uint8_t *restrict codes, uint8_t scale)
{
    const float power = of_bits((uint32_t)scale << 23);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        out[i] = from_fp8(codes[i]) * power;
}

static TARGET void LEVEL(write_fp8)(uint8_t *restrict codes, uint8_t *scale, const float *restrict x,
                                                  const uint32_t *restrict words, int shift)
{
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < BLOCK; i++) {
        const int32_t magnitude = finite_magnitude(x[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    *scale = scale_of(largest);
    const float inverse = of_bits((uint32_t)(254 - *scale) << 23);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        codes[i] = to_fp8_by(x[i], inverse, words[i] >> shift & 0xffff);
}

/* A moment as it is stored: of 8-bit state m, or the root of v. */
static TARGET void LEVEL(read_state)(float *restrict out, const void *stored, const uint8_t *scale,
                                                   int64_t state)
{
    if (state == FP8_STATE)
        LEVEL(read_fp8)(out, stored, *scale);
    else
        LEVEL(read)(out, stored, state == BFLOAT16_STATE ? BFLOAT16 : FLOAT32);
}

static TARGET void LEVEL(write_state)(void *stored, uint8_t *scale, int64_t state,
                                                    const float *restrict x, const uint32_t *restrict words, int shift)
{
    if (state == FP8_STATE)
        LEVEL(write_fp8)(stored, scale, x, words, shift);
    else if (state == BFLOAT16_STATE)
        LEVEL(write_by)(stored, x, BFLOAT16, words, shift);
    else
        LEVEL(write)(stored, x, FLOAT32);
}

static TARGET void LEVEL(read_params)(float *restrict p, const struct stretch *at)
{
    const struct job *job = at->job;
    LEVEL(read)(p, at->param, job->storage);
    if (job->rounding == KAHAN) {
        float rest[BLOCK] ALIGNED;
        LEVEL(read)(rest, at->compensation, job->storage);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            p[i] += rest[i];
    }
}

/* The nearest numbers, and what they leave. At a tie the old number stays, so that an update of zero changes nothing.
 */
static TARGET void LEVEL(write_kahan)(const struct stretch *at, const float *restrict p)
{
    const int64_t storage = at->job->storage;
    float old[BLOCK] ALIGNED, rounded[BLOCK] ALIGNED, rest[BLOCK] ALIGNED;
    LEVEL(read)(old, at->param, storage);
    LEVEL(write)(at->param, p, storage);
    LEVEL(read)(rounded, at->param, storage);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        const float kept = __builtin_fabsf(p[i] - old[i]) <= __builtin_fabsf(p[i] - rounded[i]) ? old[i] : rounded[i];
        rounded[i] = kept;
        rest[i] = p[i] - kept;
    }
    LEVEL(write)(at->param, rounded, storage);
    LEVEL(write)(at->compensation, rest, storage);
}

/* -- random bits ---------------------------------------------------------------------------------------------- */

/* rounding.random_words of a block. */
static TARGET void LEVEL(random_words)(uint32_t *restrict low, uint32_t *restrict high,
                                                     const struct stretch *at)
{
    const int64_t *stream = at->job->streams + STREAM * at->tensor;
    for (int start = 0, stop; start < BLOCK; start = stop) { /* parts whose positions are adjacent */
        const int64_t i = at->start + start;
        const int64_t run = i < stream[RUN] ? 0 : i / stream[RUN], within = i - run * stream[RUN];
        const int64_t left = stream[RUN] - within;
        const uint64_t first = (uint64_t)(stream[FIRST] + run * stream[STRIDE] + within);
        stop = left < BLOCK - start ? start + (int)left : BLOCK;
#pragma omp simd
        for (int k = start; k < stop; k++) {
            low[k] = (uint32_t)(first + (uint64_t)(k - start));
            high[k] = (uint32_t)((first + (uint64_t)(k - start)) >> 32);
        }
    }
    const uint32_t step = (uint32_t)(int64_t)(*counter_of(at->job, STEP, at->tensor) + 1);
    uint32_t keys[ROUNDS];
    for (int round = 0; round < ROUNDS; round++)
        keys[round] = (uint32_t)stream[SEED] + step * 0xbb67ae85u + (uint32_t)round * 0x9e3779b9u;
    const LEVEL(wide) multiplier = (LEVEL(wide)){0} + 0xd256d193u;
    for (int i = 0; i < BLOCK; i += WIDTH / 4) {
        LEVEL(wide) x, y; /* the low halves of 64-bit integers count: first elements 0, 2, 4, ..., then the others */
        memcpy(&x, low + i, WIDTH);
        memcpy(&y, high + i, WIDTH);
        LEVEL(wide) x2 = x >> 32, y2 = y >> 32;
        for (int round = 0; round < ROUNDS; round++) {
            const LEVEL(wide) key = (LEVEL(wide)){0} + keys[round];
            const LEVEL(wide) product = MULTIPLY(x, multiplier), product2 = MULTIPLY(x2, multiplier);
            x = y ^ key ^ product >> 32;
            x2 = y2 ^ key ^ product2 >> 32;
            y = product;
            y2 = product2;
        }
        x = (x & 0xffffffff) | x2 << 32;
        y = (y & 0xffffffff) | y2 << 32;
        memcpy(low + i, &x, WIDTH);
        memcpy(high + i, &y, WIDTH);
    }
}

/* -- a block's part of the two phases ------------------------------------------------------------------------- */

/* Adds x * y to LANES sums, each of every LANES-th element, so that all instruction sets add in the same order. */
static inline INLINE TARGET void LEVEL(add_dots)(double *restrict sums, const float *restrict x,
                                                 const float *restrict y)
{
    LEVEL(doubles) total[LANES * 8 / WIDTH];
    memcpy(total, sums, sizeof total);
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int k = 0; k < LANES * 8 / WIDTH; k++) {
            LEVEL(floats) a, b;
            memcpy(&a, x + i + k * WIDTH / 8, sizeof a);
            memcpy(&b, y + i + k * WIDTH / 8, sizeof b);
            total[k] += __builtin_convertvector(a, LEVEL(doubles)) * __builtin_convertvector(b, LEVEL(doubles));
        }
    }
    memcpy(sums, total, sizeof total);
}

static TARGET void LEVEL(add_products)(const struct stretch *at, const struct coefficients *c,
                                                     double (*restrict sums)[LANES], int clips)
{
    float p[BLOCK] ALIGNED, g[BLOCK] ALIGNED, m[BLOCK] ALIGNED;
    LEVEL(read)(g, at->grad, at->job->storage);
    LEVEL(read_state)(m, at->exp_avg, at->exp_avg_scales, at->job->state);
    if (c->l2 != 0)
        LEVEL(read_params)(p, at);
    if (!clips) {
        const float scale = (float)c->scale, l2 = (float)c->l2;
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            g[i] *= scale;
        if (c->l2 != 0) {
#pragma omp simd
            for (int i = 0; i < BLOCK; i++)
                g[i] += l2 * p[i];
        }
    }
    LEVEL(add_dots)(sums[MM], m, m);
    LEVEL(add_dots)(sums[MG], m, g);
    LEVEL(add_dots)(sums[GG], g, g);
    if (clips && c->l2 != 0) {
        LEVEL(add_dots)(sums[MP], m, p);
        LEVEL(add_dots)(sums[GP], g, p);
        LEVEL(add_dots)(sums[PP], p, p);
    }
}

/* From g, m and v the new m, v and p, and in g the root of v. */
static inline INLINE TARGET void LEVEL(compute)(float *restrict p, float *restrict g, float *restrict m,
                                                float *restrict v, const struct coefficients *c, int from_grad)
{
    const float scale = (float)c->scale, l2 = (float)c->l2, weight = (float)c->lerp_weight;
    const float a = (float)c->residual_m, b = (float)c->residual_g;
    const float beta2 = (float)c->beta2, rest2 = (float)(1 - c->beta2), eps = (float)c->eps;
    const float stepsize = (float)c->stepsize, decay = (float)c->scaled_decay;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        g[i] *= scale;
    if (c->l2 != 0) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            g[i] += l2 * p[i];
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        /* moments */
        m[i] = (from_grad ? g[i] : m[i]) + weight * (g[i] - m[i]);

        /* projections */
        const float residual = a * m[i] + b * g[i];

        /* variance */
        v[i] = beta2 * v[i] + rest2 * (residual * residual) + eps;
        g[i] = __builtin_sqrtf(v[i]);

        /* parameters */
        p[i] -= stepsize * (m[i] / g[i]) + decay * p[i];
    }
}

/* `count` elements of the block exist. */
static TARGET void LEVEL(update_block)(const struct stretch *at, const struct coefficients *c, int count)
{
    const struct job *job = at->job;
    float p[BLOCK] ALIGNED, g[BLOCK] ALIGNED, m[BLOCK] ALIGNED, v[BLOCK] ALIGNED;
    uint32_t low[BLOCK] ALIGNED, high[BLOCK] ALIGNED;

    LEVEL(read_params)(p, at);
    LEVEL(read)(g, at->grad, job->storage);
    LEVEL(read_state)(m, at->exp_avg, at->exp_avg_scales, job->state);
    LEVEL(read_state)(v, at->exp_avg_var, at->exp_avg_var_scales, job->state);
    if (job->state == FP8_STATE) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            v[i] *= v[i];
    }
    if (c->lerp_from_grad)
        LEVEL(compute)(p, g, m, v, c, 1);
    else
        LEVEL(compute)(p, g, m, v, c, 0);
    for (int i = count; i < BLOCK; i++)
        m[i] = g[i] = 0; /* elements that do not exist do not count for the scale */

    if (job->state != FLOAT32_STATE || job->rounding == STOCHASTIC)
        LEVEL(random_words)(low, high, at);
    LEVEL(write_state)(at->exp_avg, at->exp_avg_scales, job->state, m, low, 0);
    LEVEL(write_state)(at->exp_avg_var, at->exp_avg_var_scales, job->state, job->state == FP8_STATE ? g : v, low, 16);
    if (job->rounding == STOCHASTIC)
        LEVEL(write_by)(at->param, p, job->storage, high, 0);
    else if (job->rounding == KAHAN)
        LEVEL(write_kahan)(at, p);
    else
        LEVEL(write)(at->param, p, job->storage);
}

/* -- both phases of a chunk ----------------------------------------------------------------------------------- */

static TARGET void LEVEL(gram_low)(const struct stretch *at, const struct coefficients *c, double *out, int clips)
{
    double sums[SUMS][LANES] ALIGNED = {{0}};
    int64_t start = 0;
    for (; start + BLOCK <= at->count; start += BLOCK) {
        const struct stretch block = part_of(at, start, BLOCK);
        LEVEL(add_products)(&block, c, sums, clips);
    }
    if (start < at->count) {
        struct copies copies = {0};
        const struct stretch block = part_of(at, start, BLOCK), copy = copied(&block, &copies);
        LEVEL(add_products)(&copy, c, sums, clips);
    }
    for (int product = 0; product < SUMS; product++) {
        out[product] = 0;
        for (int lane = 0; lane < LANES; lane++)
            out[product] += sums[product][lane];
    }
}

static TARGET void LEVEL(update_low)(const struct stretch *at, const struct coefficients *c)
{
    int64_t start = 0;
    for (; start + BLOCK <= at->count; start += BLOCK) {
        const struct stretch block = part_of(at, start, BLOCK);
        LEVEL(update_block)(&block, c, BLOCK);
    }
    if (start < at->count) {
        struct copies copies = {0};
        const struct stretch block = part_of(at, start, BLOCK), copy = copied(&block, &copies);
        LEVEL(update_block)(&copy, c, (int)block.count);
        copy_back(&block, &copies);
    }
}

#ifdef __clang__
#pragma STDC FP_CONTRACT DEFAULT
#else
#pragma GCC pop_options
#endif
