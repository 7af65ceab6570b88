/* The three loops over elements. _cpu.c includes this file once for every pair of a storage type and an
 * instruction set, with these macros set:
 *
 *   NAME(x)   the function's name for this pair
 *   TARGET    the function attribute that selects the instruction set
 *   STORED    how a parameter and its gradient lie in memory; LOAD and STORE convert
 *   REAL      the type of the moments, and of the arithmetic; ROOT is its square root
 *
 * A loop is written once and inlined for each case that would be a branch inside it: GCC unswitches such a branch and
 * then vectorises only one side, and a reducing loop without weight decay must not read the parameter at all.
 */

static inline INLINE TARGET void NAME(products_of)(const struct stretch *at, const struct coefficients *c, double *out,
                                                   int with_l2, int from_grad)
{
    const STORED *restrict param = at->param;
    const STORED *restrict grad = at->grad;
    const REAL *restrict exp_avg = at->exp_avg;
    const REAL scale = (REAL)c->scale, l2 = (REAL)c->l2, weight = (REAL)c->lerp_weight;
    double dot = 0, mm = 0, gg = 0;
#pragma omp simd reduction(+ : dot, mm, gg)
    for (int64_t i = 0; i < at->count; i++) {
        REAL g = scale * LOAD(grad[i]);
        if (with_l2)
            g += l2 * LOAD(param[i]);
        REAL m = exp_avg[i];
        m = (from_grad ? g : m) + weight * (g - m);
        dot += (double)m * (double)g;
        mm += (double)m * (double)m;
        gg += (double)g * (double)g;
    }
    out[DOT] = dot;
    out[MM] = mm;
    out[GG] = gg;
}

/* <m, g>, |m|^2 and |g|^2 of the new first moment and the gradient the update uses. In float64, where no square of a
 * float32 overflows, and where the sum does not depend on how a layer is cut into pieces. */
static TARGET void NAME(products)(const struct stretch *at, const struct coefficients *c, double *out)
{
    if (c->lerp_from_grad && c->l2 != 0)
        NAME(products_of)(at, c, out, 1, 1);
    else if (c->lerp_from_grad)
        NAME(products_of)(at, c, out, 0, 1);
    else if (c->l2 != 0)
        NAME(products_of)(at, c, out, 1, 0);
    else
        NAME(products_of)(at, c, out, 0, 0);
}

static inline INLINE TARGET void NAME(gram_of)(const struct stretch *at, double *out, int with_l2)
{
    const STORED *restrict param = at->param;
    const STORED *restrict grad = at->grad;
    const REAL *restrict exp_avg = at->exp_avg;
    double mm = 0, mg = 0, gg = 0, mp = 0, gp = 0, pp = 0;
#pragma omp simd reduction(+ : mm, mg, gg, mp, gp, pp)
    for (int64_t i = 0; i < at->count; i++) {
        const double m = exp_avg[i], g = LOAD(grad[i]);
        mm += m * m;
        mg += m * g;
        gg += g * g;
        if (with_l2) {
            const double p = LOAD(param[i]);
            mp += m * p;
            gp += g * p;
            pp += p * p;
        }
    }
    out[GRAM_MM] = mm;
    out[GRAM_MG] = mg;
    out[GRAM_GG] = gg;
    out[GRAM_MP] = mp;
    out[GRAM_GP] = gp;
    out[GRAM_PP] = pp;
}

/* The six inner products of the old first moment, the raw gradient and the parameter, in float64: those of the
 * clipped gradient are differences of these. */
static TARGET void NAME(gram)(const struct stretch *at, const struct coefficients *c, double *out)
{
    if (c->l2 != 0)
        NAME(gram_of)(at, out, 1);
    else
        NAME(gram_of)(at, out, 0);
}

static inline INLINE TARGET void NAME(update_of)(const struct stretch *at, const struct coefficients *c, int with_l2,
                                                 int from_grad)
{
    STORED *restrict param = at->param;
    const STORED *restrict grad = at->grad;
    REAL *restrict exp_avg = at->exp_avg;
    REAL *restrict exp_avg_var = at->exp_avg_var;
    const REAL scale = (REAL)c->scale, l2 = (REAL)c->l2, weight = (REAL)c->lerp_weight;
    const REAL a = (REAL)c->residual_m, b = (REAL)c->residual_g;
    const REAL beta2 = (REAL)c->beta2, rest2 = (REAL)(1 - c->beta2), eps = (REAL)c->eps;
    const REAL stepsize = (REAL)c->stepsize, shrink = (REAL)c->shrink;
#pragma omp simd
    for (int64_t i = 0; i < at->count; i++) {
        const REAL p = LOAD(param[i]);
        REAL g = scale * LOAD(grad[i]);
        if (with_l2)
            g += l2 * p;

        /* moments */
        REAL m = exp_avg[i];
        m = (from_grad ? g : m) + weight * (g - m);
        exp_avg[i] = m;

        /* projections */
        const REAL residual = a * m + b * g;

        /* variance */
        const REAL v = beta2 * exp_avg_var[i] + rest2 * (residual * residual) + eps;
        exp_avg_var[i] = v;

        /* parameters */
        param[i] = STORE(p - (stepsize * (m / ROOT(v)) + shrink * p));
    }
}

/* New moments and parameters. */
static TARGET void NAME(update)(const struct stretch *at, const struct coefficients *c)
{
    if (c->lerp_from_grad && c->l2 != 0)
        NAME(update_of)(at, c, 1, 1);
    else if (c->lerp_from_grad)
        NAME(update_of)(at, c, 0, 1);
    else if (c->l2 != 0)
        NAME(update_of)(at, c, 1, 0);
    else
        NAME(update_of)(at, c, 0, 0);
}
