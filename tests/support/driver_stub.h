// The part of CUDA's driver and of AOTInductor's shim that generated C++ calls, told on stdout instead of done.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

typedef int CUresult;
typedef struct Module* CUmodule;
typedef struct Function* CUfunction;
typedef struct Stream* cudaStream_t;
constexpr CUresult CUDA_SUCCESS = 0;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;

struct Module {
  uint64_t hash;
};
struct Function {
  Module* module;
  std::string entry;
};

static CUresult refused = CUDA_SUCCESS;
extern const std::map<std::string, int> argument_counts;
extern const std::map<const char*, size_t> cubin_sizes();

inline CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const auto sizes = cubin_sizes();
  const auto* bytes = static_cast<const unsigned char*>(image);
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (size_t i = 0; i < sizes.at(static_cast<const char*>(image)); i++) {
    hash = (hash ^ bytes[i]) * 1099511628211ull;
  }
  *module = new Module{hash};
  std::printf("load %llu aligned %d\n", (unsigned long long)hash, (int)(reinterpret_cast<uint64_t>(image) % 16 == 0));
  return refused;
}
inline CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* entry) {
  *function = new Function{module, entry};
  return CUDA_SUCCESS;
}
inline CUresult cuFuncSetAttribute(CUfunction function, int, int value) {
  std::printf("shared %s %d\n", function->entry.c_str(), value);
  return CUDA_SUCCESS;
}
inline CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "as the test wants it";
  return CUDA_SUCCESS;
}
inline CUresult cuLaunchKernel(
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    cudaStream_t stream, void** arguments, void** extra) {
  std::printf("launch %s %llu grid %u block %u shared %u rest %d stream %llu :", f->entry.c_str(),
      (unsigned long long)f->module->hash, gx, bx, shared, gy * gz * by * bz == 1 && extra == nullptr,
      (unsigned long long)reinterpret_cast<uint64_t>(stream));
  for (int i = 0; i < argument_counts.at(f->entry); i++) {
    std::printf(" %llu", (unsigned long long)*static_cast<uint64_t*>(arguments[i]));
  }
  std::printf("\n");
  return refused;
}

struct AtenTensorOpaque {
  uint64_t address;
};
typedef AtenTensorOpaque* AtenTensorHandle;
typedef int AOTITorchError;
#define AOTI_TORCH_ERROR_CODE_CHECK(call) \
  if (call) throw std::runtime_error(#call)

static int alive = 0, made = 0;
inline AOTITorchError aoti_torch_clone_preserve_strides(AtenTensorHandle self, AtenTensorHandle* to) {
  std::printf("clone %llu\n", (unsigned long long)self->address);
  alive++;
  *to = new AtenTensorOpaque{0x900000ull + 0x1000ull * made++};
  return 0;
}
inline AOTITorchError aoti_torch_empty_strided(
    int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t type, int32_t device,
    AtenTensorHandle* to) {
  std::printf("empty %lld of %d on %d:%d dense %d\n", (long long)sizes[0], dtype, type, device,
      ndim == 1 && strides[0] == 1);
  alive++;
  *to = new AtenTensorOpaque{0x900000ull + 0x1000ull * made++};
  return 0;
}
inline AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(500ull + device);
  return 0;
}
inline int32_t aoti_torch_device_type_cuda() { return 1; }
inline int32_t aoti_torch_dtype_float32() { return 6; }
inline int32_t aoti_torch_dtype_float16() { return 5; }
inline int32_t aoti_torch_dtype_bfloat16() { return 15; }
inline int32_t aoti_torch_dtype_int32() { return 3; }

class RAIIAtenTensorHandle {
 public:
  RAIIAtenTensorHandle() = default;
  RAIIAtenTensorHandle(AtenTensorHandle handle) : handle_(handle) {}
  RAIIAtenTensorHandle(const RAIIAtenTensorHandle&) = delete;
  RAIIAtenTensorHandle(RAIIAtenTensorHandle&& other) : handle_(std::exchange(other.handle_, nullptr)) {}
  RAIIAtenTensorHandle& operator=(RAIIAtenTensorHandle&& other) {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~RAIIAtenTensorHandle() {
    alive -= handle_ != nullptr;
    delete handle_;
  }
  operator AtenTensorHandle() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};
inline void* get_data_ptr_wrapper(AtenTensorHandle tensor) { return reinterpret_cast<void*>(tensor->address); }
