/* The address, device, dtype, shape and strides of a tensor, read from the Python object by DLPack's C exchange API.
 *
 * The declarations follow the DLPack standard, version 1.3: github.com/dmlc/dlpack. torch provides the functions as
 * torch.Tensor.__dlpack_c_exchange_api__. Reading a tensor takes as long as one call of data_ptr() in Python.
 */

#include <stdint.h>

struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct exchange {
    struct {
        uint32_t major, minor;
    } version;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*read)(void *object, struct dl_tensor *out); /* 0 on success; owns nothing */
    void *current_stream;
};

static uint64_t mixed(uint64_t hash, int64_t number)
{
    hash = (hash ^ (uint64_t)number) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Write a tensor's address and a hash of its device, dtype, shape and strides. Returns 0 if it has no memory. */
static int describe(const struct exchange *api, void *object, uint64_t *address, uint64_t *form)
{
    struct dl_tensor tensor;
    if (api->read(object, &tensor) != 0)
        return 0;
    int64_t elements = 1;
    uint64_t hash = mixed((uint64_t)tensor.device.type << 32, tensor.device.id);
    hash = mixed(hash, tensor.dtype.code | tensor.dtype.bits << 8 | (int64_t)tensor.dtype.lanes << 16);
    hash = mixed(hash, tensor.ndim);
    for (int32_t i = 0; i < tensor.ndim; i++) {
        hash = mixed(mixed(hash, tensor.shape[i]), tensor.strides ? tensor.strides[i] : -1);
        elements *= tensor.shape[i];
    }
    if (tensor.data == 0 && elements != 0)
        return 0; /* the memory was freed */
    *address = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    *form = hash;
    return 1;
}
