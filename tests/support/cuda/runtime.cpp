// The CUDA runtime: devices, memory, streams, events, graphs and launches, as torch calls them.
//
// "Device" memory is host memory that only this file knows to be a device's. A function that torch calls and
// that is missing here is the real runtime's, which answers that there is no driver.
#include "order.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

using namespace standin;

static thread_local cudaError_t last_error = cudaSuccess;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static cudaError_t fail(cudaError_t error) { last_error = error; return error; }

// ------------------------------------------------------------ devices
// The numbers in CUDA_VISIBLE_DEVICES, or all of STANDIN_GPUS.
static const std::vector<int>& devices() {
    static auto* found = [] {
        auto* numbers = new std::vector<int>;
        int count = atoi(setting("STANDIN_GPUS", "1"));
        const char* visible = getenv("CUDA_VISIBLE_DEVICES");
        if (!visible)
            for (int i = 0; i < count; i++) numbers->push_back(i);
        for (const char* at = visible; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : "")
            if (atoi(at) < 0 || atoi(at) >= count) break;  // as CUDA: numbers after a wrong one are ignored
            else numbers->push_back(atoi(at));
        return numbers;
    }();
    return *found;
}

int standin::physical_device(int device) { return devices().at(device); }

static bool is_device(int device) { return device >= 0 && device < (int)devices().size(); }
static size_t memory_bytes() { return (size_t)(atof(setting("STANDIN_MEMORY_GB", "80")) * (1 << 30)); }

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = devices().size();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return devices().empty() ? fail(cudaErrorNoDevice) : cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!is_device(device)) return fail(cudaErrorInvalidDevice);
    cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    strcpy(p.name, "CUDA stand-in");
    double capability = atof(setting("STANDIN_CAPABILITY", "8.0"));
    p.major = (int)capability;
    p.minor = (int)(capability * 10 + 0.5) % 10;
    p.totalGlobalMem = memory_bytes();
    p.multiProcessorCount = 108;
    p.warpSize = 32;
    p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 2147483647;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.maxThreadsPerMultiProcessor = 2048;
    p.maxBlocksPerMultiProcessor = 32;
    p.sharedMemPerBlock = 49152;
    p.sharedMemPerBlockOptin = 101376;
    p.sharedMemPerMultiprocessor = 167936;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.l2CacheSize = 40 << 20;
    p.concurrentKernels = p.unifiedAddressing = p.canMapHostMemory = p.managedMemory = 1;
    p.streamPrioritiesSupported = p.cooperativeLaunch = p.memoryPoolsSupported = p.hostRegisterSupported = 1;
    p.asyncEngineCount = 3;
    p.memPitch = 2147483647;
    p.textureAlignment = 512;
    p.memoryBusWidth = 5120;
    p.pciBusID = 1 + physical_device(device);
    memset(&p.uuid, 0x40 + physical_device(device), sizeof p.uuid);
    *properties = p;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
    std::map<int, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)p.sharedMemPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)p.sharedMemPerBlockOptin},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)p.sharedMemPerMultiprocessor},
        {cudaDevAttrWarpSize, p.warpSize},
        {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
        {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
        {cudaDevAttrComputeCapabilityMajor, p.major},
        {cudaDevAttrComputeCapabilityMinor, p.minor},
        {cudaDevAttrClockRate, 1410000},
        {cudaDevAttrMemoryClockRate, 1215000},
        {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
        {cudaDevAttrMemoryPoolsSupported, 1},
    };
    *value = values[attribute];
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to an error during capture";
        default: return "an error of the CUDA stand-in";
    }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Functions of the driver are asked for by name; torch takes an error of theirs as "not supported".
static int not_supported() { return 801; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
    *function = (void*)not_supported;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ------------------------------------------------------------ capture rules
// The stream whose capture forbids this thread a call that waits, allocates or queries; else nullptr.
static Stream* forbidding_stream() {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return nullptr;
    for (Stream* stream : all_streams()) {
        if (!stream->graph || stream->mode == cudaStreamCaptureModeRelaxed) continue;
        bool is_global = stream->mode == cudaStreamCaptureModeGlobal && thread_mode == stream->mode;
        if (is_global || stream->owner == std::this_thread::get_id()) return stream;
    }
    return nullptr;
}

static cudaError_t forbidden(Stream& stream, const char* call) {
    record("FORBIDDEN", std::string(call) + " while a stream captures");
    stream.capture_failed = true;
    return fail(cudaErrorStreamCaptureUnsupported);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(thread_mode, *mode);
    return cudaSuccess;
}

// ------------------------------------------------------------ memory
enum Kind { DEVICE, PINNED, REGISTERED };
struct Block {
    size_t size;
    Kind kind;
    int device;
};
static auto& blocks = *new std::map<char*, Block>;
static auto& used_bytes = *new std::map<int, size_t>;  // by device, of this process

static const Block* find_block(const void* address) {
    auto found = blocks.upper_bound((char*)address);
    if (found == blocks.begin()) return nullptr;
    --found;
    return (char*)address < found->first + found->second.size ? &found->second : nullptr;
}

static bool is_on_device(const void* address) {
    const Block* block = find_block(address);
    return block && block->kind == DEVICE;
}

static cudaError_t allocate(void** address, size_t size, Kind kind, const char* call) {
    Guard lock;
    if (Stream* stream = forbidding_stream()) return forbidden(*stream, call);
    size_t& used = used_bytes[current_device];
    if (kind == DEVICE && used + size > memory_bytes()) return fail(cudaErrorMemoryAllocation);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* found = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    blocks[(char*)found] = {size, kind, current_device};
    if (kind == DEVICE) used += size;
    std::string where = kind == DEVICE ? " on device " + std::to_string(physical_device(current_device)) : "";
    record("ALLOCATION", std::to_string(size) + (kind == DEVICE ? "" : " pinned") + where);
    *address = found;
    return cudaSuccess;
}

// Freeing waits for all work, as CUDA does.
static cudaError_t release(void* address, const char* call) {
    if (!address) return cudaSuccess;
    Guard lock;
    if (Stream* stream = forbidding_stream()) return forbidden(*stream, call);
    for (size_t i = 0; i < all_streams().size(); i++) {
        Stream& stream = *all_streams()[i];
        synchronize(lock, stream.pending, stream.host_copies, stream.clock);
    }
    auto found = blocks.find((char*)address);
    if (found == blocks.end()) return fail(cudaErrorInvalidValue);
    Block block = found->second;
    blocks.erase(found);
    forget(address, block.size);
    if (block.kind == DEVICE) used_bytes[block.device] -= block.size;
    if (block.kind != REGISTERED) munmap(address, block.size ? block.size : 1);
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void** address, size_t size) {
    return allocate(address, size, DEVICE, "cudaMalloc");
}
API cudaError_t cudaFree(void* address) { return release(address, "cudaFree"); }
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    return allocate(address, size, PINNED, "cudaHostAlloc");
}
API cudaError_t cudaFreeHost(void* address) { return release(address, "cudaFreeHost"); }

API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
    Guard lock;
    blocks[(char*)address] = {size, REGISTERED, current_device};
    record("ALLOCATION", std::to_string(size) + " pinned");
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) { return release(address, "cudaHostUnregister"); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Guard lock;
    *total = memory_bytes();
    *free = *total - used_bytes[current_device];
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    Guard lock;
    memset(attributes, 0, sizeof *attributes);
    const Block* block = find_block(address);
    if (!block) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        return cudaSuccess;
    }
    attributes->type = block->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = block->device;
    attributes->devicePointer = (void*)address;
    if (block->kind != DEVICE) attributes->hostPointer = (void*)address;
    return cudaSuccess;
}

// A call that follows a blocking copy of the same thread at once, as torch's does, waits for nothing more.
static thread_local Stream* just_waited = nullptr;

API cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t size, cudaMemcpyKind,
                                cudaStream_t handle) {
    bool to_device, from_device, pageable;
    {
        Guard lock;
        to_device = is_on_device(destination);
        from_device = is_on_device(source);
        pageable = (to_device && !find_block(source)) || (from_device && !find_block(destination));
    }
    if (pageable) record("WAIT", to_device ? "copy from pageable memory" : "copy to pageable memory", true);
    Guard lock;
    Stream& stream = stream_of(handle);
    if (stream.graph) {
        if (pageable) return forbidden(stream, "a copy of pageable memory");
        stream.graph->nodes++;
        stream.graph->copies.push_back([=] { memmove(destination, source, size); });
        return cudaSuccess;
    }
    issue(stream);
    if (from_device) access(stream, source, size, false, "a copy");
    if (to_device) access(stream, destination, size, true, "a copy");
    finish(lock, stream.pending);  // one right order of events: this copy begins when the stream is idle
    if (pageable || to_device || !from_device) memmove(destination, source, size);
    just_waited = pageable ? &stream : nullptr;
    if (pageable) synchronize(lock, stream.pending, stream.host_copies, stream.clock);
    if (pageable || to_device == from_device) return cudaSuccess;
    const char* bytes = (const char*)source;
    add_host_copy(stream, {destination, source, std::vector<char>(bytes, bytes + size), from_device});
    return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t handle) {
    Guard lock;
    Stream& stream = stream_of(handle);
    if (stream.graph) {
        stream.graph->nodes++;
        stream.graph->copies.push_back([=] { memset(address, value, size); });
        return cudaSuccess;
    }
    issue(stream);
    access(stream, address, size, true, "a memset");
    finish(lock, stream.pending);
    memset(address, value, size);
    return cudaSuccess;
}

// ------------------------------------------------------------ streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
    Guard lock;
    *handle = reinterpret_cast<cudaStream_t>(&new_stream());
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    bool is_wait;
    {
        Guard lock;
        is_wait = just_waited != &stream_of(handle);
        just_waited = nullptr;
    }
    if (is_wait) record("WAIT", "cudaStreamSynchronize", true);
    Guard lock;
    Stream& stream = stream_of(handle);
    if (stream.graph) return forbidden(stream, "cudaStreamSynchronize");
    synchronize(lock, stream.pending, stream.host_copies, stream.clock);
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Guard lock;
    Stream& stream = stream_of(handle);
    if (stream.graph) return forbidden(stream, "cudaStreamQuery");
    Event event{stream.clock, stream.pending, stream.host_copies, nullptr, now_ms()};
    return is_done(event) ? cudaSuccess : fail(cudaErrorNotReady);
}

API cudaError_t cudaDeviceSynchronize() {
    record("WAIT", "cudaDeviceSynchronize", true);
    Guard lock;
    if (Stream* stream = forbidding_stream()) return forbidden(*stream, "cudaDeviceSynchronize");
    for (size_t i = 0; i < all_streams().size(); i++) {
        Stream& stream = *all_streams()[i];
        if (stream.device != current_device) continue;
        synchronize(lock, stream.pending, stream.host_copies, stream.clock);
        }
    return cudaSuccess;
}

// ------------------------------------------------------------ events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
    *handle = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    delete reinterpret_cast<Event*>(handle);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
    Guard lock;
    Stream& stream = stream_of(stream_handle);
    issue(stream);
    *reinterpret_cast<Event*>(handle) =
        Event{stream.clock, stream.pending, stream.host_copies, stream.graph, now_ms()};
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Guard lock;
    if (Stream* stream = forbidding_stream()) return forbidden(*stream, "cudaEventQuery");
    auto& event = *reinterpret_cast<Event*>(handle);
    if (event.graph) return fail(cudaErrorCapturedEvent);
    return is_done(event) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    record("WAIT", "cudaEventSynchronize", true);
    Guard lock;
    if (Stream* stream = forbidding_stream()) return forbidden(*stream, "cudaEventSynchronize");
    auto& event = *reinterpret_cast<Event*>(handle);
    synchronize(lock, event.pending, event.host_copies, event.clock);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = reinterpret_cast<Event*>(to)->at_ms - reinterpret_cast<Event*>(from)->at_ms;
    return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    Guard lock;
    Stream& stream = stream_of(handle);
    auto& event = *reinterpret_cast<Event*>(event_handle);
    if (event.graph && !stream.graph) {  // the stream joins the capture
        stream.graph = event.graph;
        stream.mode = cudaStreamCaptureModeThreadLocal;
        stream.owner = std::this_thread::get_id();
    }
    wait_for(stream, event);
    return cudaSuccess;
}

// ------------------------------------------------------------ kernels
static cudaError_t launch(dim3 grid, cudaStream_t handle) {
    if (!grid.x || !grid.y || !grid.z) return fail(cudaErrorInvalidConfiguration);
    Guard lock;
    Stream& stream = stream_of(handle);
    if (stream.graph) stream.graph->nodes++;
    issue(stream);
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
    return launch(grid, stream);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
    return launch(grid, stream);
}

// What `kernel<<<grid, block, memory, stream>>>()` is compiled to.
using Configuration = std::tuple<dim3, dim3, size_t, cudaStream_t>;
static thread_local std::vector<Configuration> configurations;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, cudaStream_t stream) {
    configurations.emplace_back(grid, block, memory, stream);
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* memory, cudaStream_t* stream) {
    std::tie(*grid, *block, *memory, *stream) = configurations.back();
    configurations.pop_back();
    return cudaSuccess;
}

API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*,
                                int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = 49152;
    attributes->binaryVersion = attributes->ptxVersion = 80;
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// ------------------------------------------------------------ graphs
API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    static unsigned long long captures = 0;
    Guard lock;
    Stream& stream = stream_of(handle);
    if (!handle) return fail(cudaErrorStreamCaptureUnsupported);
    if (stream.graph) return fail(cudaErrorIllegalState);
    stream.graph = new Graph;
    stream.capture_failed = false;
    stream.mode = mode;
    stream.capture_id = ++captures;
    stream.owner = std::this_thread::get_id();
    return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
    Guard lock;
    Stream& stream = stream_of(handle);
    if (!stream.graph) return fail(cudaErrorIllegalState);
    Graph* graph = stream.graph;
    bool failed = false;
    for (Stream* other : all_streams())
        if (other->graph == graph) {
            failed = failed || other->capture_failed;
            other->graph = nullptr;
        }
    *result = failed ? nullptr : reinterpret_cast<cudaGraph_t>(graph);
    if (failed) return fail(cudaErrorStreamCaptureInvalidated);
    record("CAPTURE", std::to_string(graph->nodes));
    return cudaSuccess;
}

static cudaStreamCaptureStatus capture_status(const Stream& stream) {
    if (!stream.graph) return cudaStreamCaptureStatusNone;
    return stream.capture_failed ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    Guard lock;
    *status = capture_status(stream_of(handle));
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                         size_t* count) {
    Guard lock;
    Stream& stream = stream_of(handle);
    *status = capture_status(stream);
    if (id) *id = stream.capture_id;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream.graph);
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = reinterpret_cast<Graph*>(graph)->nodes;
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* result, cudaGraph_t graph,
                                              unsigned long long) {
    *result = reinterpret_cast<cudaGraphExec_t>(graph);
    return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
    Guard lock;
    Stream& stream = stream_of(handle);
    issue(stream);
    finish(lock, stream.pending);
    for (auto& copy : reinterpret_cast<Graph*>(graph)->copies) copy();
    return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// ------------------------------------------------------------ cuBLAS
// Products do nothing, as other kernels. Arguments that are not used are left out of the declarations.
struct Blas {
    cudaStream_t stream = nullptr;
    int math_mode = 0;
};

static int product(void* handle) { launch(dim3(1), static_cast<Blas*>(handle)->stream); return 0; }
API int cublasCreate_v2(void** handle) { *handle = new Blas; return 0; }
API int cublasSetStream_v2(Blas* handle, cudaStream_t stream) { handle->stream = stream; return 0; }
API int cublasSetMathMode(Blas* handle, int mode) { handle->math_mode = mode; return 0; }
API int cublasGetMathMode(Blas* handle, int* mode) { *mode = handle->math_mode; return 0; }
API int cublasDestroy_v2(void*) { return 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasGemmEx(void* handle) { return product(handle); }
API int cublasGemmStridedBatchedEx(void* handle) { return product(handle); }
API int cublasSgemm_v2(void* handle) { return product(handle); }
API int cublasSgemmStridedBatched(void* handle) { return product(handle); }
API int cublasSgemv_v2(void* handle) { return product(handle); }
API int cublasDgemm_v2(void* handle) { return product(handle); }
API int cublasSdot_v2(void* handle) { return product(handle); }

// cublasLt: its descriptions are never read, and there is one algorithm, all zeros.
static int describe(void** description) { *description = calloc(1, 256); return 0; }
static int discard(void* description) { free(description); return 0; }
API int cublasLtMatmulDescCreate(void** d) { return describe(d); }
API int cublasLtMatmulDescDestroy(void* d) { return discard(d); }
API int cublasLtMatmulDescSetAttribute() { return 0; }
API int cublasLtMatmulPreferenceCreate(void** d) { return describe(d); }
API int cublasLtMatmulPreferenceDestroy(void* d) { return discard(d); }
API int cublasLtMatmulPreferenceSetAttribute() { return 0; }
API int cublasLtMatrixLayoutCreate(void** d) { return describe(d); }
API int cublasLtMatrixLayoutDestroy(void* d) { return discard(d); }
API int cublasLtMatrixLayoutSetAttribute() { return 0; }

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results,
                                       int* count) {
    memset(results, 0, 64);
    *count = 1;
    return 0;
}

API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                       const void*, void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
    launch(dim3(1), stream);
    return 0;
}
