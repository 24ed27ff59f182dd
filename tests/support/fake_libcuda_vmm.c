/* A libcuda.so.1 without a GPU, for shared/vmm: device memory is memfds, mapped where the caller reserved addresses.
 *
 * It proves the C interface (argument order, struct layout, entry points looked up by version) that a fake driver in
 * Python cannot see, and keeps CUDA's rules: whole handles, no map over a map, no access or unmap over a hole.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef uint64_t Handle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { GRANULARITY = 2 << 20, MOST = 1 << 16, POSIX_FD = 1, PINNED = 1, DEVICE = 1, READ = 1, READ_WRITE = 3 };

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} Prop;
typedef struct { Location location; int flags; } Access;
_Static_assert(sizeof(Prop) == 32 && sizeof(Access) == 12, "layout of CUDA's structs");

static const size_t TOTAL = (size_t)64 << 30;
static size_t used;
static struct { int fd, imported; size_t size; } handles[MOST];
static struct { CUdeviceptr at; size_t size; } maps[MOST];
static Handle num_handles = 1;
static size_t num_maps;
static __thread void *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_DEVICE : SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
CUresult cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0xab, 16); return device ? INVALID_DEVICE : SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0xc0; return device; }
CUresult cuDevicePrimaryCtxRelease(int device) { return device; }
CUresult cuCtxSetCurrent(void *context) { current = context; return context == (void *)0xc0 ? SUCCESS : INVALID_CONTEXT; }
CUresult cuMemGetInfo(size_t *free, size_t *total) {
    *free = TOTAL - used, *total = TOTAL;
    return current ? SUCCESS : INVALID_CONTEXT;
}
static int wrong(const Prop *prop) {
    return prop->type != PINNED || prop->handle_types != POSIX_FD || prop->location.type != DEVICE || prop->location.id;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    *size = GRANULARITY;
    return wrong(prop) || option ? INVALID_VALUE : SUCCESS;
}
static CUresult new_handle(Handle *handle, int fd, size_t size, int imported) {
    if (num_handles == MOST) return OUT_OF_MEMORY;
    handles[num_handles].fd = fd, handles[num_handles].size = size, handles[num_handles].imported = imported;
    *handle = num_handles++;
    return SUCCESS;
}
CUresult cuMemCreate(Handle *handle, size_t size, const Prop *prop, unsigned long long flags) {
    if (wrong(prop) || flags || !size || size % GRANULARITY) return INVALID_VALUE;
    if (used + size > TOTAL) return OUT_OF_MEMORY;
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    used += size;
    return new_handle(handle, fd, size, 0);
}
static int bad(Handle handle) { return !handle || handle >= num_handles || !handles[handle].size; }
CUresult cuMemRelease(Handle handle) {
    if (bad(handle)) return INVALID_VALUE;
    if (!handles[handle].imported) used -= handles[handle].size;
    close(handles[handle].fd);
    handles[handle].size = 0;
    return SUCCESS;
}
CUresult cuMemExportToShareableHandle(void *out, Handle handle, int type, unsigned long long flags) {
    if (bad(handle) || handles[handle].imported || type != POSIX_FD || flags) return INVALID_VALUE;
    *(int *)out = fcntl(handles[handle].fd, F_DUPFD_CLOEXEC, 0);
    return *(int *)out < 0 ? 999 : SUCCESS;
}
CUresult cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int type) {
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    struct stat status;
    if (fd < 0 || type != POSIX_FD || fstat(fd, &status)) return INVALID_VALUE;
    return new_handle(handle, fd, (size_t)status.st_size, 1);
}
static void *hole(void *at, size_t size, int flags) {
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    if (!size || size % GRANULARITY || alignment || wish || flags) return INVALID_VALUE;
    uintptr_t at = (uintptr_t)hole(NULL, size + GRANULARITY, 0);
    *out = (at + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    return at == (uintptr_t)MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    for (size_t i = 0; i < num_maps; i++)
        if (maps[i].at >= at && maps[i].at < at + size) return INVALID_VALUE;
    return munmap((void *)at, size) ? INVALID_VALUE : SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    if (bad(handle) || handles[handle].size != size || offset || flags || at % GRANULARITY) return INVALID_VALUE;
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (i < num_maps && (maps[i].at >= at + size || maps[i].at + maps[i].size <= at)) i++;
    if (i == num_maps && num_maps < MOST &&
        mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle].fd, 0) != MAP_FAILED) {
        maps[num_maps].at = at, maps[num_maps++].size = size;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
static size_t covered(CUdeviceptr at, size_t size) {
    size_t sum = 0;
    for (size_t i = 0; i < num_maps; i++)
        if (maps[i].at >= at && maps[i].at + maps[i].size <= at + size) sum += maps[i].size;
    return sum;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const Access *access, size_t count) {
    if (count != 1 || access->location.type != DEVICE || access->location.id) return INVALID_VALUE;
    if (access->flags != READ && access->flags != READ_WRITE) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int whole = covered(at, size) == size;
    pthread_mutex_unlock(&lock);
    int protection = PROT_READ | (access->flags == READ_WRITE ? PROT_WRITE : 0);
    return whole && !mprotect((void *)at, size, protection) ? SUCCESS : INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    CUresult result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (covered(at, size) == size && hole((void *)at, size, MAP_FIXED) != MAP_FAILED) {
        for (size_t i = 0; i < num_maps;)
            if (maps[i].at >= at && maps[i].at < at + size) maps[i] = maps[--num_maps];
            else i++;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemsetD8(CUdeviceptr at, unsigned char value, size_t size) {
    memset((void *)at, value, size);
    return current ? SUCCESS : INVALID_CONTEXT;
}
CUresult cuStreamSynchronize(void *stream) { (void)stream; return current ? SUCCESS : INVALID_CONTEXT; }
CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) { memcpy(target, (void *)source, size); return SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) { memcpy((void *)target, source, size); return SUCCESS; }

#define ENTRY(symbol, since) { #symbol, since, (void *)symbol }
static const struct { const char *name; int since; void *function; } entries[] = {
    ENTRY(cuInit, 2000), ENTRY(cuDriverGetVersion, 2020), ENTRY(cuDeviceGet, 2000), ENTRY(cuDeviceGetCount, 2000),
    ENTRY(cuDeviceGetUuid, 9020), ENTRY(cuDevicePrimaryCtxRetain, 7000), ENTRY(cuDevicePrimaryCtxRelease, 7000),
    ENTRY(cuCtxSetCurrent, 4000), ENTRY(cuMemGetInfo, 2000), ENTRY(cuMemGetAllocationGranularity, 10020),
    ENTRY(cuMemCreate, 10020), ENTRY(cuMemRelease, 10020), ENTRY(cuMemExportToShareableHandle, 10020),
    ENTRY(cuMemImportFromShareableHandle, 10020), ENTRY(cuMemAddressReserve, 10020), ENTRY(cuMemAddressFree, 10020),
    ENTRY(cuMemMap, 10020), ENTRY(cuMemSetAccess, 10020), ENTRY(cuMemUnmap, 10020), ENTRY(cuMemsetD8, 2000),
    ENTRY(cuStreamSynchronize, 2000), ENTRY(cuMemcpyDtoH, 2000), ENTRY(cuMemcpyHtoD, 2000),
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
