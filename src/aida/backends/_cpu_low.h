/* The two loops over elements for batches that are stored in fewer bits. _cpu.c includes this file once per
 * instruction set, with these macros:
 *
 *   LEVEL(x)   the function's name for this instruction set
 *   TARGET     the function attribute that selects it
 *   WIDTH      bytes of a vector register
 *   MULTIPLY   the products of the low halves of 64-bit integers in two registers
 *   WIDEN      half a register of floats as doubles
 *
 * A chunk is worked through in blocks of 128 elements: read as floats, updated, rounded and stored. So formats are
 * branches per block, not per element.
 */

typedef uint64_t LEVEL(wide) __attribute__((vector_size(WIDTH)));
typedef double LEVEL(doubles) __attribute__((vector_size(WIDTH)));
typedef float LEVEL(floats) __attribute__((vector_size(WIDTH / 2)));

/* Adds x * x, x * y and y * y to LANES sums each, so that all instruction sets add in the same order. */
static __attribute__((noinline)) TARGET void LEVEL(add_dots)(double *xx, double *xy, double *yy, const float *x, const float *y)
{
    for (int lane = 0; lane < LANES; lane += WIDTH / 8) {
        LEVEL(doubles) total_xx, total_xy, total_yy;
        memcpy(&total_xx, xx + lane, WIDTH);
        memcpy(&total_xy, xy + lane, WIDTH);
        memcpy(&total_yy, yy + lane, WIDTH);
        for (int i = lane; i < BLOCK; i += LANES) {
            LEVEL(floats) a, b;
            memcpy(&a, x + i, WIDTH / 2);
            memcpy(&b, y + i, WIDTH / 2);
            const LEVEL(doubles) c = WIDEN(a), d = WIDEN(b);
            total_xx += c * c;
            total_xy += c * d;
            total_yy += d * d;
        }
        memcpy(xx + lane, &total_xx, WIDTH);
        memcpy(xy + lane, &total_xy, WIDTH);
        memcpy(yy + lane, &total_yy, WIDTH);
    }
}

/* From here on the compiler must not contract a * b + c, or instruction sets would round to different codes. (Above,
 * the products are exact in float64, so contraction changes no bit.) */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

/* -- a block in memory ---------------------------------------------------------------------------------------- */

/* 128 numbers as floats: in `out`, or where they are stored if they are floats. */
static TARGET float *LEVEL(read)(float *restrict out, void *stored, int64_t storage)
{
    const uint16_t *restrict halves = stored;
    if (storage == FLOAT32)
        return stored;
    if (storage == BFLOAT16) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            out[i] = from_bfloat16(halves[i]);
    } else {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            out[i] = from_float16(halves[i]);
    }
    return out;
}

/* Store the nearest numbers. Floats are where they belong already. */
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
    }
}

/* Round by 16 of the 32 random bits per element, from bit `shift` on. */
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

static inline INLINE TARGET void LEVEL(read_fp8)(float *restrict out, const uint8_t *restrict codes, uint8_t scale,
                                                 int squared)
{
    const float power = of_bits((uint32_t)scale << 23);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        const float x = from_fp8(codes[i]) * power;
        out[i] = squared ? x * x : x;
    }
}

static TARGET void LEVEL(write_fp8)(uint8_t *restrict codes, uint8_t *scale, const float *restrict x, int32_t largest,
                                    const uint32_t *restrict words, int shift)
{
    *scale = scale_of(largest);
    const float inverse = of_bits((uint32_t)(254 - *scale) << 23);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        codes[i] = to_fp8_by(x[i], inverse, words[i] >> shift & 0xffff);
}

static TARGET float *LEVEL(read_m)(float *out, const struct stretch *at)
{
    if (at->job->state != FP8_STATE)
        return LEVEL(read)(out, at->exp_avg, at->job->state == BFLOAT16_STATE ? BFLOAT16 : FLOAT32);
    LEVEL(read_fp8)(out, at->exp_avg, *at->exp_avg_scales, 0);
    return out;
}

static TARGET float *LEVEL(read_v)(float *out, const struct stretch *at)
{
    if (at->job->state != FP8_STATE)
        return LEVEL(read)(out, at->exp_avg_var, at->job->state == BFLOAT16_STATE ? BFLOAT16 : FLOAT32);
    LEVEL(read_fp8)(out, at->exp_avg_var, *at->exp_avg_var_scales, 1); /* the codes are of the root */
    return out;
}

static TARGET void LEVEL(write_state)(void *stored, uint8_t *scale, int64_t state, const float *x, int32_t largest,
                                      const uint32_t *words, int shift)
{
    if (state == FP8_STATE)
        LEVEL(write_fp8)(stored, scale, x, largest, words, shift);
    else if (state == BFLOAT16_STATE)
        LEVEL(write_by)(stored, x, BFLOAT16, words, shift);
}

static TARGET float *LEVEL(read_params)(float *restrict out, const struct stretch *at)
{
    const struct job *job = at->job;
    float *p = LEVEL(read)(out, at->param, job->storage);
    if (job->rounding == KAHAN) {
        float rest[BLOCK] ALIGNED;
        LEVEL(read)(rest, at->compensation, job->storage);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            out[i] += rest[i];
    }
    return p;
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

/* rounding.random_words of REGISTERS * WIDTH / 8 counters, in the low halves of x and y. Several registers at a time keep
 * the processor busier. */
#define REGISTERS 4
static inline INLINE TARGET void LEVEL(generate)(LEVEL(wide) *x, LEVEL(wide) *y, uint32_t key)
{
    const LEVEL(wide) zero = {0}, multiplier = zero + 0xd256d193u;
    for (int k = 0; k < REGISTERS; k++)
        y[k] = x[k] >> 32;
    for (int round = 0; round < ROUNDS; round++, key += 0x9e3779b9u)
        for (int k = 0; k < REGISTERS; k++) {
            const LEVEL(wide) product = MULTIPLY(x[k], multiplier);
            x[k] = y[k] ^ (zero + key) ^ product >> 32;
            y[k] = product;
        }
}

/* The random words of a block: rounding.random_words if parameters need bits too, else rounding.random_word, in `low`. */
static TARGET void LEVEL(random_bits)(uint32_t *restrict low, uint32_t *restrict high, const struct stretch *at)
{
    const int64_t *stream = at->job->streams + STREAM * at->tensor;
    const int shared = at->job->rounding != STOCHASTIC, adjacent = at->start + BLOCK <= stream[RUN];
    const uint64_t first = position_of(stream, at->start);
    const int pairs = shared && adjacent && first % 2 == 0; /* both words of a counter belong to neighbours */
    const uint32_t step = (uint32_t)(int64_t)(*counter_of(at->job, STEP, at->tensor) + 1);
    const uint32_t key = (uint32_t)stream[SEED] + step * 0xbb67ae85u + (shared ? 0x85ebca6bu : 0);
    enum { AT_ONCE = WIDTH / 8, COUNTERS = REGISTERS * AT_ONCE };
    uint64_t positions[BLOCK] ALIGNED, words[BLOCK] ALIGNED;
    LEVEL(wide) ascending, x[REGISTERS], y[REGISTERS];
    memcpy(&ascending, numbers, WIDTH);
    for (int i = 0; i < BLOCK && !pairs; i++)
        positions[i] = adjacent ? first + (uint64_t)i : position_of(stream, at->start + i);
    for (int i = 0; i < (pairs ? BLOCK / 2 : BLOCK); i += COUNTERS) {
        for (int k = 0; k < REGISTERS; k++) {
            x[k] = ascending + (first / 2 + (uint64_t)(i + k * AT_ONCE));
            if (!pairs)
                memcpy(x + k, positions + i + k * AT_ONCE, WIDTH);
            if (shared && !pairs)
                x[k] >>= 1;
        }
        LEVEL(generate)(x, y, key);
        for (int k = 0; k < REGISTERS; k++) {
            const LEVEL(wide) both = (x[k] & 0xffffffff) | y[k] << 32;
            memcpy(pairs ? (void *)(low + 2 * (i + k * AT_ONCE)) : words + i + k * AT_ONCE, &both, WIDTH);
        }
    }
#pragma omp simd
    for (int i = 0; i < (pairs ? 0 : BLOCK); i++) {
        low[i] = (uint32_t)(shared ? words[i] >> positions[i] % 2 * 32 : words[i]);
        high[i] = (uint32_t)(words[i] >> 32);
    }
}

/* -- a block's part of the two phases ------------------------------------------------------------------------- */

/* Adds to sums[SUMS][LANES]. */
static TARGET void LEVEL(add_products)(const struct stretch *at, const struct coefficients *c, double (*sums)[LANES],
                                       int clips)
{
    float p_copy[BLOCK] ALIGNED, g_copy[BLOCK] ALIGNED, m_copy[BLOCK] ALIGNED, used[BLOCK] ALIGNED;
    const float *p = c->l2 != 0 ? LEVEL(read_params)(p_copy, at) : p_copy;
    const float *g = LEVEL(read)(g_copy, at->grad, at->job->storage);
    const float *m = LEVEL(read_m)(m_copy, at);
    const float scale = (float)c->scale, l2 = (float)c->l2;
    if (!clips && c->l2 != 0) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            used[i] = scale * g[i] + l2 * p[i];
        g = used;
    } else if (!clips && scale != 1) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++)
            used[i] = scale * g[i];
        g = used;
    }
    LEVEL(add_dots)(sums[MM], sums[MG], sums[GG], m, g);
    if (clips && c->l2 != 0) {
        double known[2][LANES] ALIGNED = {{0}};
        LEVEL(add_dots)(known[0], sums[MP], sums[PP], m, p);
        LEVEL(add_dots)(known[0], sums[GP], known[1], g, p);
    }
}

/* New m, v and p. With `roots` v becomes the root of v. `largest` gets the largest magnitudes of m and v. */
static inline INLINE TARGET void LEVEL(compute)(float *restrict p, const float *restrict grad, float *restrict m,
                                                float *restrict v, int32_t *restrict largest,
                                                const struct coefficients *c, int with_l2, int from_grad, int roots)
{
    const float scale = (float)c->scale, l2 = (float)c->l2, weight = (float)c->lerp_weight;
    const float a = (float)c->residual_m, b = (float)c->residual_g;
    const float beta2 = (float)c->beta2, rest2 = (float)(1 - c->beta2), eps = (float)c->eps;
    const float eps_share = (float)c->eps_share, stepsize = (float)c->stepsize, decay = (float)c->scaled_decay;
    int32_t largest_m = 0, largest_v = 0;
#pragma omp simd reduction(max : largest_m, largest_v)
    for (int i = 0; i < BLOCK; i++) {
        float g = scale * grad[i];
        if (with_l2)
            g += l2 * p[i];

        /* moments */
        m[i] = (from_grad ? g : m[i]) + weight * (g - m[i]);

        /* projections */
        const float residual = a * m[i] + b * g;

        /* variance */
        const float kept = beta2 * v[i] + rest2 * (residual * residual) + eps;
        v[i] = roots ? __builtin_sqrtf(kept) : kept;

        /* parameters */
        p[i] -= stepsize * (m[i] / __builtin_sqrtf(kept + eps_share)) + decay * p[i];

        if (roots) {
            const int32_t of_m = magnitude_of(m[i]), of_v = magnitude_of(v[i]);
            largest_m = of_m > largest_m ? of_m : largest_m;
            largest_v = of_v > largest_v ? of_v : largest_v;
        }
    }
    largest[0] = largest_m;
    largest[1] = largest_v;
}

static inline INLINE TARGET void LEVEL(compute_all)(float *p, const float *g, float *m, float *v, int32_t *largest,
                                                    const struct coefficients *c, int roots)
{
    if (c->lerp_from_grad && c->l2 != 0)
        LEVEL(compute)(p, g, m, v, largest, c, 1, 1, roots);
    else if (c->lerp_from_grad)
        LEVEL(compute)(p, g, m, v, largest, c, 0, 1, roots);
    else if (c->l2 != 0)
        LEVEL(compute)(p, g, m, v, largest, c, 1, 0, roots);
    else
        LEVEL(compute)(p, g, m, v, largest, c, 0, 0, roots);
}

/* Of the block's elements `count` exist. */
static TARGET void LEVEL(update_block)(const struct stretch *at, const struct coefficients *c, int count)
{
    const struct job *job = at->job;
    float p_copy[BLOCK] ALIGNED, g_copy[BLOCK] ALIGNED, m_copy[BLOCK] ALIGNED, v_copy[BLOCK] ALIGNED;
    uint32_t low[BLOCK] ALIGNED, high[BLOCK] ALIGNED;
    int32_t largest[2];

    float *p = LEVEL(read_params)(p_copy, at);
    const float *g = LEVEL(read)(g_copy, at->grad, job->storage);
    float *m = LEVEL(read_m)(m_copy, at), *v = LEVEL(read_v)(v_copy, at);
    if (job->state == FP8_STATE)
        LEVEL(compute_all)(p, g, m, v, largest, c, 1);
    else
        LEVEL(compute_all)(p, g, m, v, largest, c, 0);
    if (job->state == FP8_STATE && (count < BLOCK || largest[0] > LARGEST || largest[1] > LARGEST)) {
        largest[0] = largest_finite(m, count);
        largest[1] = largest_finite(v, count);
    }

    if (job->state != FLOAT32_STATE || job->rounding == STOCHASTIC)
        LEVEL(random_bits)(low, high, at);
    LEVEL(write_state)(at->exp_avg, at->exp_avg_scales, job->state, m, largest[0], low, 0);
    LEVEL(write_state)(at->exp_avg_var, at->exp_avg_var_scales, job->state, v, largest[1], low, 16);
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
        prefetch(&block);
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
