/* A stand-in for libnvidia-ml.so.1: two GPUs behind one host bridge, as NVML's C interface tells it.
 *
 * For containers that have no NVIDIA driver. It calls no other library, so that it loads under any C
 * library: gcc -shared -fPIC -nostdlib -fno-builtin -fno-tree-loop-distribute-patterns
 */

#define GPUS 2
#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TOPOLOGY_HOSTBRIDGE 30

typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char id[32]; } pci_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;

static const char *uuids[GPUS] = {
    "GPU-aaaaaaaa-0000-0000-0000-aaaaaaaaaaaa",
    "GPU-bbbbbbbb-0000-0000-0000-bbbbbbbbbbbb",
};
static const char *addresses[GPUS] = {"00000000:01:00.0", "00000000:02:00.0"};
static int handles[GPUS];

static int copy(char *to, unsigned size, const char *from)
{
    unsigned i;
    for (i = 0; i + 1 < size && from[i]; i++)
        to[i] = from[i];
    to[i] = 0;
    return OK;
}

static int index_of(void *handle)
{
    return (int)((int *)handle - handles);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code)
{
    return code == NOT_SUPPORTED ? "Not Supported" : "Stand-in Error";
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return copy(to, size, "580.159.04"); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = GPUS;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    *handle = &handles[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    unsigned gpu, i;
    for (gpu = 0; gpu < GPUS; gpu++) {
        for (i = 0; uuid[i] && uuid[i] == uuids[gpu][i]; i++)
            ;
        if (uuid[i] == uuids[gpu][i]) {
            *handle = &handles[gpu];
            return OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *to, unsigned size)
{
    return copy(to, size, uuids[index_of(handle)]);
}

int nvmlDeviceGetName(void *handle, char *to, unsigned size)
{
    (void)handle;
    return copy(to, size, "NVIDIA H200");
}

int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci)
{
    pci->domain = 0;
    pci->bus = (unsigned)index_of(handle) + 1;
    pci->device = 0;
    pci->pci_id = pci->subsystem = 0;
    copy(pci->legacy, sizeof pci->legacy, addresses[index_of(handle)] + 4);
    return copy(pci->id, sizeof pci->id, addresses[index_of(handle)]);
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_t *memory)
{
    (void)handle;
    memory->total = 141ULL << 30;
    memory->reserved = 1ULL << 30;
    memory->free = 140ULL << 30;
    memory->used = 0;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    (void)handle;
    *major = 9;
    *minor = 0;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending)
{
    (void)handle;
    *now = *pending = 0;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *found)
{
    (void)handle;
    (void)found;
    *count = 0;
    return OK;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *state)
{
    (void)handle;
    (void)link;
    (void)state;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level)
{
    (void)one;
    (void)other;
    *level = TOPOLOGY_HOSTBRIDGE;
    return OK;
}

int nvmlDeviceGetMemoryAffinity(void *handle, unsigned size, unsigned long *nodes, unsigned scope)
{
    unsigned i;
    (void)handle;
    (void)scope;
    for (i = 0; i < size; i++)
        nodes[i] = 0;
    nodes[0] = 1;
    return OK;
}
