/* The scalar functions of rule.py, under the same names, in float64. */

#include <math.h>
#include <stdint.h>

#define CLIP_GUARD 1e-6

/* columns.PRODUCT_COLUMNS: the fields of rule.Gram */
enum { MM, MG, GG, MP, GP, PP, SUMS };

/* rule.Products */
struct products {
    double dot, mm, gg;
};

/* The factor that torch's clip_grad_norm_ multiplies every gradient with. */
static double clip_coefficient(double squared_norm, double clip_norm)
{
    const double coefficient = clip_norm / (sqrt(squared_norm) + CLIP_GUARD);
    return coefficient > 1 ? 1 : coefficient;
}

/* Products of the layer whose gradient is scale * g + l2 * p. */
static struct products rescaled_products(const double *gram, double scale, double beta1, double l2)
{
    const double gg = scale * scale * gram[GG] + 2 * scale * l2 * gram[GP] + l2 * l2 * gram[PP];
    const double mg = scale * gram[MG] + l2 * gram[MP];
    const double rest = 1 - beta1;
    const double mm = beta1 * beta1 * gram[MM] + 2 * beta1 * rest * mg + rest * rest * gg;
    /* cancellation may make a sum of squares negative; NaN stays NaN */
    return (struct products){.dot = beta1 * mg + rest * gg, .mm = mm < 0 ? 0 : mm, .gg = gg < 0 ? 0 : gg};
}

/* Coefficients with m^(K) - g^(K) = a * m + b * g. */
static void residual_coefficients(struct products products, int64_t projections, double xi, double *a, double *b)
{
    double alpha = 1, beta = 1, xx = products.mm, yy = products.gg;
    for (int64_t k = 0; k < projections; k++) {
        const double inner = alpha * beta * products.dot;
        const double from_y = inner / (beta * beta * yy + xi) * beta;
        const double from_x = inner / (alpha * alpha * xx + xi) * alpha;
        const double swap = xx;
        alpha = from_y;
        beta = from_x;
        xx = yy;
        yy = swap;
    }
    *a = projections % 2 == 0 ? alpha : -beta;
    *b = projections % 2 == 0 ? -beta : alpha;
}

/* The step counted from 1. */
static double bias_correction(double beta, double step)
{
    return 1 - pow(beta, step);
}
