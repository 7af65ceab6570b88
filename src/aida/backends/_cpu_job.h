/* The tables that describe a batch, and how to look things up in them.
 *
 * Rows and columns are listed in columns.py, the fields of `struct job` in library.py, in the same order.
 */

#include <stdint.h>
#include <string.h>

/* Elements whose inner products are summed in registers before they are added to the tensor's sums. */
#define CHUNK 4096

/* rounding.BLOCK: elements of 8-bit state that share a scale. */
#define BLOCK 128

/* Partial sums of such a block. */
#define LANES 32

/* columns.POINTER_ROWS */
enum { PARAM, GRAD, EXP_AVG, EXP_AVG_VAR, STEP, SKIPPED, ROWS };

/* columns.SCALE_ROWS: with 8-bit state these follow. With Kahan sums the compensation is the last row. */
enum { EXP_AVG_SCALES = ROWS, EXP_AVG_VAR_SCALES, SCALED_ROWS };

/* columns.VALUE_COLUMNS */
enum { LR, BETA1, BETA2, EPS, L2, DECAY, XI, PROJECTIONS, CLIP_NORM, SIGN, SKIP, COLUMNS };

/* cpu.STORAGE */
enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16, STORAGES };

/* The kernels of batches that are not stored in full, after those of each storage. */
#define LOW STORAGES

/* storage.Precision */
enum { FLOAT32_STATE, BFLOAT16_STATE, FP8_STATE };

/* storage.Rounding */
enum { NEAREST, STOCHASTIC, KAHAN };

/* storage.Stream */
enum { SEED, FIRST, RUN, STRIDE, STREAM };

struct job {
    int64_t tensors;
    int64_t elements; /* in all tensors */
    int64_t runs;
    int64_t threads;
    int64_t storage;             /* of parameters and gradients */
    int64_t state;               /* how the moments are stored; FLOAT32_STATE of float64 parameters too */
    int64_t rounding;            /* of the parameters */
    int64_t level;               /* instruction set, less than aida_levels() */
    const uintptr_t *addresses;  /* (rows, tensors) */
    const int64_t *sizes;        /* (tensors) */
    const int64_t *first_chunk;  /* (tensors + 1) */
    const int64_t *first_tensor; /* (runs + 1) */
    const int64_t *streams;      /* (tensors, STREAM): where the random bits are */
    const double *values;        /* (runs, COLUMNS) */
    double *partial;             /* (chunks, SUMS) */
    double *sums;                /* (tensors, SUMS): reduce writes, apply reads */
    uint8_t *finite;             /* (tensors): whether the gradient can be used; reduce writes, apply reads */
    int32_t *owner;              /* (blocks): the thread that reduced it */
    uint8_t *stage;              /* (blocks) */
    double grad_scale;           /* divided out of the gradients */
    double squared_norm;         /* reduce writes that of the batch, apply reads that of all batches */
};

/* One chunk of a tensor, or a block of it. */
struct stretch {
    void *param, *grad, *exp_avg, *exp_avg_var;
    int64_t count;
    /* the rest is for batches that are stored in fewer bits */
    void *compensation;
    uint8_t *exp_avg_scales, *exp_avg_var_scales;
    const struct job *job;
    int64_t tensor, start; /* elements of the tensor that come before */
};

static const struct {
    int64_t param, state;
} bytes[STORAGES] = {[FLOAT64] = {8, 8}, [FLOAT32] = {4, 4}, [BFLOAT16] = {2, 4}, [FLOAT16] = {2, 4}};

/* The last i with starts[i] <= x, so that empty tensors are skipped; starts[count] is an upper bound of x. */
static int64_t find(const int64_t *starts, int64_t count, int64_t x)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (starts[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static const double *values_of(const struct job *job, int64_t tensor)
{
    return job->values + COLUMNS * find(job->first_tensor, job->runs, tensor);
}

static float *counter_of(const struct job *job, int row, int64_t tensor)
{
    return (float *)job->addresses[row * job->tensors + tensor];
}

/* Bytes per element of the moments. */
static int64_t state_bytes(const struct job *job)
{
    return job->state == FP8_STATE ? 1 : job->state == BFLOAT16_STATE ? 2 : bytes[job->storage].state;
}

/* Whether there are only float32 moments (float64 of float64 parameters) and parameters rounded to nearest. */
static int is_full(const struct job *job)
{
    return job->state == FLOAT32_STATE && job->rounding == NEAREST;
}

/* A part of a stretch. Parts of 8-bit state start at a block. */
static struct stretch part_of(const struct stretch *at, int64_t start, int64_t most)
{
    const struct job *job = at->job;
    const int64_t left = at->count - start;
    const int64_t param = start * bytes[job->storage].param, state = start * state_bytes(job);
    struct stretch part = *at;
    part.param = (char *)at->param + param;
    part.grad = (char *)at->grad + param;
    part.exp_avg = (char *)at->exp_avg + state;
    part.exp_avg_var = (char *)at->exp_avg_var + state;
    if (job->rounding == KAHAN)
        part.compensation = (char *)at->compensation + param;
    if (job->state == FP8_STATE) {
        part.exp_avg_scales += start / BLOCK;
        part.exp_avg_var_scales += start / BLOCK;
    }
    part.start += start;
    part.count = left < most ? left : most;
    return part;
}

static struct stretch stretch_of(const struct job *job, int64_t tensor, int64_t chunk)
{
    const uintptr_t *address = job->addresses + tensor;
    const int has_scales = job->state == FP8_STATE, has_rest = job->rounding == KAHAN;
    const struct stretch whole = {
        .param = (void *)address[PARAM * job->tensors],
        .grad = (void *)address[GRAD * job->tensors],
        .exp_avg = (void *)address[EXP_AVG * job->tensors],
        .exp_avg_var = (void *)address[EXP_AVG_VAR * job->tensors],
        .exp_avg_scales = has_scales ? (uint8_t *)address[EXP_AVG_SCALES * job->tensors] : 0,
        .exp_avg_var_scales = has_scales ? (uint8_t *)address[EXP_AVG_VAR_SCALES * job->tensors] : 0,
        .compensation = has_rest ? (void *)address[(has_scales ? SCALED_ROWS : ROWS) * job->tensors] : 0,
        .job = job,
        .tensor = tensor,
        .count = job->sizes[tensor],
    };
    return part_of(&whole, (chunk - job->first_chunk[tensor]) * CHUNK, CHUNK);
}

/* The elements of a block that is not full, in memory that holds 128. */
struct copies {
    char param[4 * BLOCK], grad[4 * BLOCK], exp_avg[4 * BLOCK], exp_avg_var[4 * BLOCK], compensation[2 * BLOCK];
};

static struct stretch copied(const struct stretch *at, struct copies *copies)
{
    const size_t param = (size_t)(at->count * bytes[at->job->storage].param);
    const size_t state = (size_t)(at->count * state_bytes(at->job));
    struct stretch copy = *at;
    copy.param = memcpy(copies->param, at->param, param);
    copy.grad = memcpy(copies->grad, at->grad, param);
    copy.exp_avg = memcpy(copies->exp_avg, at->exp_avg, state);
    copy.exp_avg_var = memcpy(copies->exp_avg_var, at->exp_avg_var, state);
    if (at->compensation)
        copy.compensation = memcpy(copies->compensation, at->compensation, param);
    return copy;
}

static void copy_back(const struct stretch *at, const struct copies *copies)
{
    const size_t param = (size_t)(at->count * bytes[at->job->storage].param);
    const size_t state = (size_t)(at->count * state_bytes(at->job));
    memcpy(at->param, copies->param, param);
    memcpy(at->exp_avg, copies->exp_avg, state);
    memcpy(at->exp_avg_var, copies->exp_avg_var, state);
    if (at->compensation)
        memcpy(at->compensation, copies->compensation, param);
}
