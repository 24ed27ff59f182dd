/* A libcuda.so.1 without a GPU: device memory is host memory, every call is complete when it returns.
 *
 * Only what copy_pages uses. It proves the C interface (argument order, struct layout, entry points looked up by
 * version) that a recording driver in Python cannot see. cuMemcpyBatchAsync is CUDA 13's: no failIdx.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };

typedef struct {
    int src_access_order;
    struct { int type, id; } src_hint, dst_hint;
    unsigned flags;
} Attributes; /* CUmemcpyAttributes_v1, 24 bytes */
_Static_assert(sizeof(Attributes) == 24, "layout of CUmemcpyAttributes");

static uintptr_t next_handle = 0x1000;
static unsigned long long num_batches, num_descriptors, num_copies;

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "software device");
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = (void *)0xc0;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(int device) { (void)device; return SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { return context == (void *)0xc0 ? SUCCESS : 201; }
CUresult cuStreamCreate(void **stream, unsigned flags) {
    *stream = (void *)(next_handle += 16);
    return flags > 1 ? INVALID_VALUE : SUCCESS;
}
CUresult cuStreamDestroy(void *stream) { return stream ? SUCCESS : 400; }
CUresult cuStreamSynchronize(void *stream) { (void)stream; return SUCCESS; }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream;
    return event && !flags ? SUCCESS : 400;
}
CUresult cuStreamWaitValue32(void *stream, CUdeviceptr at, uint32_t value, unsigned flags) {
    (void)stream, (void)at, (void)value, (void)flags;
    return SUCCESS;
}
CUresult cuEventCreate(void **event, unsigned flags) {
    *event = (void *)(next_handle += 16);
    return flags == 2 ? SUCCESS : INVALID_VALUE;
}
CUresult cuEventDestroy(void *event) { return event ? SUCCESS : 400; }
CUresult cuEventRecord(void *event, void *stream) { return event && stream ? SUCCESS : 400; }
CUresult cuEventQuery(void *event) { return event ? SUCCESS : 400; }
CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    void *memory = NULL;
    if (posix_memalign(&memory, 1 << 21, size)) return OUT_OF_MEMORY;
    *address = (CUdeviceptr)(uintptr_t)memory;
    return SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { free((void *)(uintptr_t)address); return SUCCESS; }
CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    return posix_memalign(address, 4096, size) ? OUT_OF_MEMORY : SUCCESS;
}
CUresult cuMemFreeHost(void *address) { free(address); return SUCCESS; }
CUresult cuMemHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    return address && size ? SUCCESS : INVALID_VALUE;
}
CUresult cuMemHostUnregister(void *address) { return address ? SUCCESS : INVALID_VALUE; }
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, void *stream) {
    (void)stream;
    memset((void *)(uintptr_t)address, value, size);
    return SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, void *stream) {
    if (!stream) return INVALID_VALUE;
    memmove((void *)(uintptr_t)target, (void *)(uintptr_t)source, size);
    num_copies++;
    return SUCCESS;
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                            Attributes *attributes, size_t *first, size_t num_attributes, void *stream) {
    if (!stream || !count || num_attributes != 1 || *first != 0) return INVALID_VALUE;
    if (attributes->src_access_order < 1 || attributes->src_access_order > 3) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (!sizes[i]) return INVALID_VALUE;
        memmove((void *)(uintptr_t)targets[i], (void *)(uintptr_t)sources[i], sizes[i]);
    }
    num_batches++;
    num_descriptors += count;
    return SUCCESS;
}
/* What the fake counted; for tests. */
void fake_counts(unsigned long long counts[3]) {
    counts[0] = num_copies, counts[1] = num_batches, counts[2] = num_descriptors;
}

#define ENTRY(symbol, since) { #symbol, since, (void *)symbol }
static const struct { const char *name; int since; void *function; } entries[] = {
    ENTRY(cuInit, 2000), ENTRY(cuDriverGetVersion, 2020), ENTRY(cuDeviceGet, 2000), ENTRY(cuDeviceGetCount, 2000),
    ENTRY(cuDeviceGetName, 2000), ENTRY(cuDevicePrimaryCtxRetain, 7000), ENTRY(cuDevicePrimaryCtxRelease, 7000),
    ENTRY(cuCtxSetCurrent, 4000), ENTRY(cuStreamCreate, 2000), ENTRY(cuStreamDestroy, 2000),
    ENTRY(cuStreamSynchronize, 2000), ENTRY(cuStreamWaitEvent, 3020), ENTRY(cuStreamWaitValue32, 8000),
    ENTRY(cuEventCreate, 2000), ENTRY(cuEventDestroy, 2000), ENTRY(cuEventRecord, 2000), ENTRY(cuEventQuery, 2000),
    ENTRY(cuMemAlloc, 2000), ENTRY(cuMemFree, 2000), ENTRY(cuMemHostAlloc, 2020), ENTRY(cuMemFreeHost, 2000),
    ENTRY(cuMemHostRegister, 4000), ENTRY(cuMemHostUnregister, 4000), ENTRY(cuMemsetD8Async, 3020),
    ENTRY(cuMemcpyAsync, 4000), ENTRY(cuMemcpyBatchAsync, 13000),
};

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    *function = NULL;
    if (status) *status = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    if (!strcmp(symbol, "cuGetProcAddress")) {
        *function = (void *)cuGetProcAddress_v2;
        if (status) *status = 0;
        return SUCCESS;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(symbol, entries[i].name) && version >= entries[i].since) {
            *function = entries[i].function;
            if (status) *status = 0;
            return SUCCESS;
        }
    return status ? SUCCESS : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    int status;
    CUresult result = cuGetProcAddress_v2(symbol, function, version, flags, &status);
    return result == SUCCESS && status ? NOT_FOUND : result;
}
