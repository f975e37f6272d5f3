// libcuda.so.1, the driver: what Triton asks of it to load and launch kernels. Kernels do nothing.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#define API extern "C" __attribute__((visibility("default")))

static CUcontext the_context = reinterpret_cast<CUcontext>(16);

API CUresult cuInit(unsigned) {
    int count;
    return cudaGetDeviceCount(&count) ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int number) { *device = number; return CUDA_SUCCESS; }

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

API CUresult cuCtxGetCurrent(CUcontext* context) { *context = the_context; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = the_context;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the CUDA stand-in's driver";
    return CUDA_SUCCESS;
}

// The runtime's way to a function; Triton and torch then look it up in this library.
API CUresult cuGetProcAddress_v2(const char*, void** function, int, cuuint64_t,
                                 CUdriverProcAddressQueryResult*) {
    *function = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = static_cast<CUmodule>(malloc(8));
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
API CUresult cuModuleUnload(CUmodule module) { free(module); return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
    *function = static_cast<CUfunction>(malloc(8));
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 32;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, reinterpret_cast<void*>(address));
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(value) = address;
    return found.type == cudaMemoryTypeUnregistered ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult launch(unsigned x, unsigned y, unsigned z, CUstream stream) {
    return (CUresult)cudaLaunchKernel(nullptr, dim3{x, y, z}, dim3{1, 1, 1}, nullptr, 0, stream);
}

API CUresult cuLaunchKernel(CUfunction, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned,
                            unsigned, CUstream stream, void**, void**) {
    return launch(x, y, z, stream);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
    return launch(config->gridDimX, config->gridDimY, config->gridDimZ, config->hStream);
}
