/* A libcuda.so.1 with two GPUs and no hardware, for the mover: virtual memory, streams and copies together.
 *
 * Memory is memfds, every call is complete when it returns. What it holds callers to: a copy runs on a stream of the
 * current context, and that GPU has been let into every mapped page that the copy reads (and writes, if it writes).
 * fake_libcuda.c and fake_libcuda_vmm.c test the two halves more closely, with one GPU each.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef uint64_t Handle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
       NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };
enum { GRANULARITY = 2 << 20, MOST = 1 << 14, GPUS = 2, POSIX_FD = 1, PINNED = 1, DEVICE = 1, READ = 1, READ_WRITE = 3 };

typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } Prop;
typedef struct { Location location; int flags; } Access;
typedef struct { int src_access_order; Location src_hint, dst_hint; unsigned flags; } Attributes;
_Static_assert(sizeof(Prop) == 32 && sizeof(Access) == 12 && sizeof(Attributes) == 24, "layout of CUDA's structs");

static struct { int fd, device; size_t size; } handles[MOST];
static struct { CUdeviceptr at; size_t size; int device, access[GPUS]; } maps[MOST];
static Handle num_handles = 1;
static size_t num_maps;
static uintptr_t next_object = 0x1000;
static __thread uintptr_t current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define HERE ((int)(current & 15))
#define NEED_CONTEXT if (!current) return INVALID_CONTEXT

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < GPUS ? SUCCESS : INVALID_DEVICE; }
CUresult cuDeviceGetCount(int *count) { *count = GPUS; return SUCCESS; }
CUresult cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "software device %d", device);
    return SUCCESS;
}
static int retained[GPUS];
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(0xc00 + (uintptr_t)device);
    retained[device]++;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(int device) {
    if (device >= GPUS) return INVALID_DEVICE;
    retained[device]--;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained[device] > 0;
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) { NEED_CONTEXT; return SUCCESS; }
CUresult cuCtxGetCurrent(void **context) { *context = (void *)current; return SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { current = (uintptr_t)context; return SUCCESS; }
CUresult cuMemGetInfo(size_t *free, size_t *total) { NEED_CONTEXT; *free = *total = (size_t)64 << 30; return SUCCESS; }
static int wrong(const Prop *prop) {
    return prop->type != PINNED || prop->handle_types != POSIX_FD || prop->location.type != DEVICE || prop->location.id >= GPUS;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    *size = GRANULARITY;
    return wrong(prop) || option ? INVALID_VALUE : SUCCESS;
}
static CUresult new_handle(Handle *handle, int fd, size_t size, int device) {
    pthread_mutex_lock(&lock);
    int full = num_handles == MOST;
    if (!full) {
        handles[num_handles].fd = fd, handles[num_handles].size = size, handles[num_handles].device = device;
        *handle = num_handles++;
    }
    pthread_mutex_unlock(&lock);
    return full ? OUT_OF_MEMORY : SUCCESS;
}
CUresult cuMemCreate(Handle *handle, size_t size, const Prop *prop, unsigned long long flags) {
    if (wrong(prop) || flags || !size || size % GRANULARITY) return INVALID_VALUE;
    int fd = memfd_create(prop->location.id ? "gpu1" : "gpu0", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    return new_handle(handle, fd, size, prop->location.id);
}
static int bad(Handle handle) { return !handle || handle >= num_handles || !handles[handle].size; }
CUresult cuMemRelease(Handle handle) {
    if (bad(handle)) return INVALID_VALUE;
    close(handles[handle].fd);
    handles[handle].size = 0;
    return SUCCESS;
}
CUresult cuMemExportToShareableHandle(void *out, Handle handle, int type, unsigned long long flags) {
    if (bad(handle) || type != POSIX_FD || flags) return INVALID_VALUE;
    *(int *)out = fcntl(handles[handle].fd, F_DUPFD_CLOEXEC, 0);
    return *(int *)out < 0 ? 999 : SUCCESS;
}
CUresult cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int type) {
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    struct stat status;
    char path[64], name[64] = "";
    if (fd < 0 || type != POSIX_FD || fstat(fd, &status)) return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0) return INVALID_VALUE;
    return new_handle(handle, fd, (size_t)status.st_size, strstr(name, "gpu1") != NULL);
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    if (!size || size % GRANULARITY || alignment || wish % GRANULARITY || flags) return INVALID_VALUE;
    void *at = mmap((void *)wish, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *out = ((uintptr_t)at + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    return at == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
static size_t covered(CUdeviceptr at, size_t size) {
    size_t sum = 0;
    for (size_t i = 0; i < num_maps; i++)
        if (maps[i].at >= at && maps[i].at + maps[i].size <= at + size) sum += maps[i].size;
    return sum;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    return covered(at, size) || munmap((void *)at, size) ? INVALID_VALUE : SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    if (bad(handle) || handles[handle].size != size || offset || flags || at % GRANULARITY) return INVALID_VALUE;
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!covered(at, size) && num_maps < MOST &&
        mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handles[handle].fd, 0) != MAP_FAILED) {
        memset(&maps[num_maps], 0, sizeof maps[0]);
        maps[num_maps].device = handles[handle].device;
        maps[num_maps].at = at, maps[num_maps++].size = size;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const Access *access, size_t count) {
    if (count != 1 || access->location.type != DEVICE || access->location.id >= GPUS) return INVALID_VALUE;
    if (access->flags != READ && access->flags != READ_WRITE) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int whole = covered(at, size) == size;
    for (size_t i = 0; whole && i < num_maps; i++)
        if (maps[i].at >= at && maps[i].at < at + size) maps[i].access[access->location.id] = access->flags;
    pthread_mutex_unlock(&lock);
    return whole ? SUCCESS : INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (covered(at, size) == size && mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                                          -1, 0) != MAP_FAILED) {
        for (size_t i = 0; i < num_maps;)
            if (maps[i].at >= at && maps[i].at < at + size) maps[i] = maps[--num_maps];
            else i++;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
/* Whether this GPU may touch these bytes: all in one mapped allocation that it was let into, or all in host memory. */
static int may(int device, CUdeviceptr at, size_t size, int flags) {
    int found = 1;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_maps; i++) {
        if (maps[i].at >= at + size || at >= maps[i].at + maps[i].size) continue;
        int inside = at >= maps[i].at && at + size <= maps[i].at + maps[i].size;
        found = inside && (maps[i].access[device] & flags) == flags;
        break;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
CUresult cuStreamCreate(void **stream, unsigned flags) {
    NEED_CONTEXT;
    *stream = (void *)((next_object += 16) | (uintptr_t)HERE);
    return flags > 1 ? INVALID_VALUE : SUCCESS;
}
static int foreign(void *stream) { return !stream || (int)((uintptr_t)stream & 15) != HERE || !current; }
CUresult cuStreamDestroy(void *stream) { return foreign(stream) ? INVALID_HANDLE : SUCCESS; }
CUresult cuStreamSynchronize(void *stream) { (void)stream; NEED_CONTEXT; return SUCCESS; }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return event && !flags && !foreign(stream) ? SUCCESS : INVALID_HANDLE;
}
CUresult cuEventCreate(void **event, unsigned flags) {
    NEED_CONTEXT;
    *event = (void *)((next_object += 16) | (uintptr_t)HERE);
    return flags == 2 ? SUCCESS : INVALID_VALUE;
}
CUresult cuEventDestroy(void *event) { return event ? SUCCESS : INVALID_HANDLE; }
CUresult cuEventRecord(void *event, void *stream) {
    return foreign(stream) || ((uintptr_t)event & 15) != ((uintptr_t)stream & 15) ? INVALID_HANDLE : SUCCESS;
}
CUresult cuEventQuery(void *event) { return event ? SUCCESS : INVALID_HANDLE; }
CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    NEED_CONTEXT;
    return flags != 1 || posix_memalign(address, 4096, size) ? OUT_OF_MEMORY : SUCCESS;
}
CUresult cuMemFreeHost(void *address) { free(address); return SUCCESS; }
CUresult cuMemHostRegister(void *address, size_t size, unsigned flags) {
    NEED_CONTEXT;
    return (uintptr_t)address % 4096 || !size || !(flags & 1) || flags & ~11u ? INVALID_VALUE : SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags) {
    *out = (CUdeviceptr)(uintptr_t)address;
    return flags ? INVALID_VALUE : SUCCESS;
}
#define cuMemHostGetDevicePointer cuMemHostGetDevicePointer_v2
CUresult cuMemHostUnregister(void *address) { NEED_CONTEXT; return address ? SUCCESS : INVALID_VALUE; }
static CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t size) {
    if (!may(HERE, source, size, READ) || !may(HERE, target, size, READ_WRITE)) return ILLEGAL_ADDRESS;
    memmove((void *)(uintptr_t)target, (void *)(uintptr_t)source, size);
    return SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, void *stream) {
    return foreign(stream) ? INVALID_HANDLE : copy(target, source, size);
}
CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                            Attributes *attributes, size_t *first, size_t num_attributes, void *stream) {
    if (foreign(stream) || !count || num_attributes != 1 || *first != 0) return INVALID_VALUE;
    if (attributes->src_access_order < 1 || attributes->src_access_order > 3) return INVALID_VALUE;
    CUresult result = SUCCESS;
    for (size_t i = 0; i < count && result == SUCCESS; i++)
        result = sizes[i] ? copy(targets[i], sources[i], sizes[i]) : INVALID_VALUE;
    return result;
}
CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) {
    return may(HERE, source, size, READ) ? (memcpy(target, (void *)source, size), SUCCESS) : ILLEGAL_ADDRESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) {
    return may(HERE, target, size, READ_WRITE) ? (memcpy((void *)target, source, size), SUCCESS) : ILLEGAL_ADDRESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char byte, size_t size) {
    return may(HERE, at, size, READ_WRITE) ? (memset((void *)at, byte, size), SUCCESS) : ILLEGAL_ADDRESS;
}
#define cuMemsetD8 cuMemsetD8_v2
CUresult cuMemsetD32_v2(CUdeviceptr at, unsigned word, size_t count) {
    NEED_CONTEXT;
    if (!may(HERE, at, 4 * count, READ_WRITE)) return ILLEGAL_ADDRESS;
    for (size_t i = 0; i < count; i++) ((unsigned *)at)[i] = word;
    return SUCCESS;
}
#define cuMemsetD32 cuMemsetD32_v2

#define ENTRY(symbol, since) { #symbol, since, (void *)symbol }
static const struct { const char *name; int since; void *function; } entries[] = {
    ENTRY(cuInit, 2000), ENTRY(cuDriverGetVersion, 2020), ENTRY(cuDeviceGet, 2000), ENTRY(cuDeviceGetCount, 2000),
    ENTRY(cuDeviceGetUuid, 9020), ENTRY(cuDeviceGetName, 2000), ENTRY(cuDevicePrimaryCtxRetain, 7000),
    ENTRY(cuDevicePrimaryCtxRelease, 7000), ENTRY(cuDevicePrimaryCtxGetState, 7000), ENTRY(cuCtxGetCurrent, 4000), ENTRY(cuCtxSynchronize, 2000),
    ENTRY(cuCtxSetCurrent, 4000), ENTRY(cuMemGetInfo, 2000),
    ENTRY(cuMemGetAllocationGranularity, 10020), ENTRY(cuMemCreate, 10020), ENTRY(cuMemRelease, 10020),
    ENTRY(cuMemExportToShareableHandle, 10020), ENTRY(cuMemImportFromShareableHandle, 10020),
    ENTRY(cuMemAddressReserve, 10020), ENTRY(cuMemAddressFree, 10020), ENTRY(cuMemMap, 10020),
    ENTRY(cuMemSetAccess, 10020), ENTRY(cuMemUnmap, 10020), ENTRY(cuStreamCreate, 2000), ENTRY(cuStreamDestroy, 2000),
    ENTRY(cuStreamSynchronize, 2000), ENTRY(cuStreamWaitEvent, 3020), ENTRY(cuEventCreate, 2000),
    ENTRY(cuEventDestroy, 2000), ENTRY(cuEventRecord, 2000), ENTRY(cuEventQuery, 2000), ENTRY(cuMemHostAlloc, 2020),
    ENTRY(cuMemFreeHost, 2000), ENTRY(cuMemHostRegister, 4000), ENTRY(cuMemHostUnregister, 4000),
    ENTRY(cuMemHostGetDevicePointer, 3020), ENTRY(cuMemsetD8, 2000), ENTRY(cuMemsetD32, 2000), ENTRY(cuMemcpyAsync, 4000), ENTRY(cuMemcpyBatchAsync, 13000), ENTRY(cuMemcpyDtoH, 2000), ENTRY(cuMemcpyHtoD, 2000),
};

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    *function = !strcmp(symbol, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(symbol, entries[i].name) && version >= entries[i].since) *function = entries[i].function;
    if (status) *status = *function ? 0 : 1;
    return *function || status ? SUCCESS : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
