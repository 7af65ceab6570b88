/* The two loops over elements. _cpu.c includes this file once per pair of a storage type and an instruction set, with
 * these macros:
 *
 *   NAME(x)   the function's name for this pair
 *   TARGET    the function attribute that selects the instruction set
 *   STORED    the type of a parameter and its gradient in memory; LOAD and STORE convert
 *   REAL      the type of the moments and of the arithmetic; ROOT is its square root
 *
 * Each loop is written once and inlined for every case that would be a branch inside it. GCC would unswitch such a
 * branch and vectorise only one side, and a reduction without weight decay must not read the parameter at all.
 */

/* In float64, in which no square of a float32 overflows and sums hardly depend on how a layer is cut into pieces. */
static inline INLINE TARGET void NAME(gram_of)(const struct stretch *at, const struct coefficients *c, double *out,
                                               int with_l2, int clips)
{
    const STORED *restrict param = at->param;
    const STORED *restrict grad = at->grad;
    const REAL *restrict exp_avg = at->exp_avg;
    const REAL scale = (REAL)c->scale, l2 = (REAL)c->l2;
    /* deriving the products of the new moment from those of the old one would lose float64 digits */
    const int new = !clips && sizeof(REAL) == sizeof(double);
    double mm = 0, mg = 0, gg = 0, mp = 0, gp = 0, pp = 0;
#pragma omp simd reduction(+ : mm, mg, gg, mp, gp, pp)
    for (int64_t i = 0; i < at->count; i++) {
        REAL used = LOAD(grad[i]);
        if (!clips) {
            used *= scale;
            if (with_l2)
                used += l2 * LOAD(param[i]);
        }
        const double old = exp_avg[i], g = used;
        const double m = new ? (c->lerp_from_grad ? g : old) + c->lerp_weight * (g - old) : old;
        mm += m * m;
        mg += m * g;
        gg += g * g;
        if (clips && with_l2) {
            const double p = LOAD(param[i]);
            mp += m * p;
            gp += g * p;
            pp += p * p;
        }
    }
    out[MM] = mm;
    out[MG] = mg;
    out[GG] = gg;
    out[MP] = mp;
    out[GP] = gp;
    out[PP] = pp;
}

/* rule.Gram of the old first moment and the gradient that the update uses (in float64 without clipping, of the new
 * first moment). With clipping, whose coefficient is not known yet, of the raw gradient and the parameter. */
static TARGET void NAME(gram)(const struct stretch *at, const struct coefficients *c, double *out, int clips)
{
    if (clips && c->l2 != 0)
        NAME(gram_of)(at, c, out, 1, 1);
    else if (clips)
        NAME(gram_of)(at, c, out, 0, 1);
    else if (c->l2 != 0)
        NAME(gram_of)(at, c, out, 1, 0);
    else
        NAME(gram_of)(at, c, out, 0, 0);
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
    const REAL stepsize = (REAL)c->stepsize, decay = (REAL)c->scaled_decay;
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
        param[i] = STORE(p - (stepsize * (m / ROOT(v)) + decay * p));
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
