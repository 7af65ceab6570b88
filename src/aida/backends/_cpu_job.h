/* The tables that describe a batch, and how to look things up in them.
 *
 * Rows and columns are listed in columns.py, the fields of `struct job` in library.py, in the same order.
 */

#include <stdint.h>

/* Elements whose inner products are summed in registers before they are added to the tensor's sums. */
#define CHUNK 4096

/* columns.POINTER_ROWS */
enum { PARAM, GRAD, EXP_AVG, EXP_AVG_VAR, STEP, SKIPPED };

/* columns.VALUE_COLUMNS */
enum { LR, BETA1, BETA2, EPS, L2, DECAY, XI, PROJECTIONS, CLIP_NORM, SIGN, SKIP, COLUMNS };

/* cpu.STORAGE */
enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16, STORAGES };

struct job {
    int64_t tensors;
    int64_t elements; /* in all tensors */
    int64_t runs;
    int64_t threads;
    int64_t storage;             /* of parameters and gradients */
    int64_t level;               /* instruction set, less than aida_levels() */
    const uintptr_t *addresses;  /* (rows, tensors) */
    const int64_t *sizes;        /* (tensors) */
    const int64_t *first_chunk;  /* (tensors + 1) */
    const int64_t *first_tensor; /* (runs + 1) */
    const double *values;        /* (runs, COLUMNS) */
    double *partial;             /* (chunks, SUMS) */
    double *sums;                /* (tensors, SUMS): reduce writes, apply reads */
    uint8_t *finite;             /* (tensors): whether the gradient can be used; reduce writes, apply reads */
    int32_t *owner;              /* (blocks): the thread that reduced it */
    uint8_t *stage;              /* (blocks) */
    double grad_scale;           /* divided out of the gradients */
    double squared_norm;         /* reduce writes that of the batch, apply reads that of all batches */
};

/* One chunk of a tensor. */
struct stretch {
    void *param, *grad, *exp_avg, *exp_avg_var;
    int64_t count;
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

static struct stretch stretch_of(const struct job *job, int64_t tensor, int64_t chunk)
{
    const int64_t start = (chunk - job->first_chunk[tensor]) * CHUNK, left = job->sizes[tensor] - start;
    const uintptr_t *address = job->addresses + tensor;
    const uintptr_t param = (uintptr_t)(start * bytes[job->storage].param);
    const uintptr_t state = (uintptr_t)(start * bytes[job->storage].state);
    return (struct stretch){
        .param = (void *)(address[PARAM * job->tensors] + param),
        .grad = (void *)(address[GRAD * job->tensors] + param),
        .exp_avg = (void *)(address[EXP_AVG * job->tensors] + state),
        .exp_avg_var = (void *)(address[EXP_AVG_VAR * job->tensors] + state),
        .count = left < CHUNK ? left : CHUNK,
    };
}
