// What a grid barrier takes, and ways to finish a reduction over blocks: a second kernel, a dependent launch, a barrier,
// the last block. Microseconds of graph replays with a cold L2, medians.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 -o grid_barrier benchmarks/grid_barrier.cu && ./grid_barrier

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                      \
  do {                                                                                   \
    cudaError_t error_ = (call);                                                         \
    if (error_ != cudaSuccess) {                                                         \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(error_));       \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

constexpr unsigned kOpen = 1u << 20;  // more than there are blocks
constexpr int kStateWords = 64;
constexpr int kFinishThreads = 512;

__device__ unsigned add_acq_rel(unsigned* p, unsigned n) {
  unsigned was;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0,[%1],%2;" : "=r"(was) : "l"(p), "r"(n) : "memory");
  return was;
}

__device__ unsigned add_release(unsigned* p, unsigned n) {
  unsigned was;
  asm volatile("atom.add.release.gpu.global.u32 %0,[%1],%2;" : "=r"(was) : "l"(p), "r"(n) : "memory");
  return was;
}

__device__ unsigned load_acquire(unsigned* p) {
  unsigned now;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(now) : "l"(p) : "memory");
  return now;
}

// One counter for those who arrive, one that opens and counts those who leave; all threads fence.
struct TwoCounters {
  static constexpr int kSets = 2;  // the next barrier may begin before everybody has left this one
  __device__ static void wait(unsigned* state, unsigned blocks) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (add_acq_rel(state, 1) == blocks - 1) add_acq_rel(state + 32, kOpen);
      while (load_acquire(state + 32) < kOpen) {
      }
      if (add_acq_rel(state + 32, 1) == kOpen + blocks - 1) state[0] = state[32] = 0;
    }
    __syncthreads();
  }
};

// A counter, and a generation that the last one to arrive raises.
struct Generation {
  static constexpr int kSets = 1;
  __device__ static void wait(unsigned* state, unsigned blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned generation = load_acquire(state + 32);
      if (add_acq_rel(state, 1) == blocks - 1) {
        state[0] = 0;
        add_release(state + 32, 1);
      } else {
        while (load_acquire(state + 32) == generation) {
        }
      }
    }
    __syncthreads();
  }
};

// One counter whose highest bit changes when all have arrived.
struct OneCounter {
  static constexpr int kSets = 1;
  __device__ static void wait(unsigned* state, unsigned blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned was = add_release(state, blockIdx.x == 0 ? 0x80000000u - (blocks - 1) : 1u);
      while (((was ^ load_acquire(state)) & 0x80000000u) == 0) {
      }
    }
    __syncthreads();
  }
};

template <class Barrier>
__global__ void barriers(unsigned* state, int times) {
  for (int i = 0; i < times; i++) Barrier::wait(state + kStateWords * (i % Barrier::kSets), gridDim.x);
}

__global__ void nothing() {}

// The main kernel's work: a copy, and a row of partials from each block.
__device__ void copy(const float4* x, float4* y, long n, float* partials, int columns) {
  float sum = 0;
  long stride = (long)gridDim.x * blockDim.x;
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += 2 * stride) {
    bool second = i + stride < n;
    float4 a = x[i], b = second ? x[i + stride] : a;
    sum += a.x + b.y;
    y[i] = a;
    if (second) y[i + stride] = b;
  }
  for (int c = threadIdx.x; c < columns; c += blockDim.x) partials[(long)blockIdx.x * columns + c] = sum + c;
}

// Sums of partials, 32 columns a block at a time.
__device__ void finish(const float* partials, int rows, int columns, float* out, float* shared) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int c = blockIdx.x * 32; c < columns; c += gridDim.x * 32) {
    float sum = 0;
#pragma unroll 8
    for (int r = warp; r < rows; r += warps) sum += __ldcg(partials + (long)r * columns + c + lane);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < warps; w++) sum += shared[w * 32 + lane];
      out[c + lane] = sum;
    }
    __syncthreads();
  }
}

__global__ void main_kernel(const float4* x, float4* y, long n, float* partials, int columns) {
  copy(x, y, n, partials, columns);
}

__global__ void main_early(const float4* x, float4* y, long n, float* partials, int columns) {
  asm volatile("griddepcontrol.launch_dependents;");
  copy(x, y, n, partials, columns);
}

__global__ void main_late(const float4* x, float4* y, long n, float* partials, int columns) {
  copy(x, y, n, partials, columns);
  __threadfence();
  asm volatile("griddepcontrol.launch_dependents;");
}

__global__ void finish_kernel(const float* partials, int rows, int columns, float* out) {
  __shared__ float shared[1024];
  finish(partials, rows, columns, out, shared);
}

__global__ void finish_dependent(const float* partials, int rows, int columns, float* out) {
  __shared__ float shared[1024];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  finish(partials, rows, columns, out, shared);
}

template <class Barrier>
__global__ void behind_barrier(
    const float4* x, float4* y, long n, float* partials, int columns, float* out, unsigned* state) {
  __shared__ float shared[1024];
  copy(x, y, n, partials, columns);
  Barrier::wait(state, gridDim.x);
  finish(partials, gridDim.x, columns, out, shared);
}

__device__ void sum_rows(const float* rows, int count, int columns, float* out) {
  for (int c = threadIdx.x * 4; c < columns; c += blockDim.x * 4) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 12
    for (int r = 0; r < count; r++) {
      float4 a = __ldcg((const float4*)(rows + (long)r * columns + c));
      sum.x += a.x, sum.y += a.y, sum.z += a.z, sum.w += a.w;
    }
    *(float4*)(out + c) = sum;
  }
}

__device__ bool last(unsigned* counter, unsigned of) {
  __shared__ unsigned ticket;
  __syncthreads();
  if (threadIdx.x == 0) ticket = add_acq_rel(counter, 1);
  __syncthreads();
  bool is_last = ticket == of - 1;
  if (is_last && threadIdx.x == 0) *counter = 0;
  return is_last;
}

// The last block of each group sums the group's rows, the last of those sums what the groups have.
__global__ void last_block(const float4* x, float4* y, long n, float* partials, int columns, float* joined, float* out,
    unsigned* state, int group) {
  copy(x, y, n, partials, columns);
  int g = blockIdx.x / group, groups = (gridDim.x + group - 1) / group;
  int mine = min(group, (int)gridDim.x - g * group);
  if (!last(state + 32 * (g + 1), mine)) return;
  sum_rows(partials + (long)g * group * columns, mine, columns, joined + (long)g * columns);
  if (last(state, groups)) sum_rows(joined, groups, columns, out);
}

__global__ void sweep(const int4* p, long n, int* out) {
  int a = 0;
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x) {
    int4 v = p[i];
    a ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (a == 123456) *out = a;
}

constexpr long kSweep = (256l << 20) / 16;
int4* swept;
int* swept_out;
cudaStream_t stream;

double microseconds(const std::function<void()>& work) {
  cudaGraph_t graph;
  cudaGraphExec_t run;
  work();
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  work();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&run, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> samples;
  for (int i = 0; i < 60; i++) {
    float ms;
    sweep<<<528, 512, 0, stream>>>(swept, kSweep, swept_out);
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    samples.push_back(ms * 1e3f);
  }
  std::sort(samples.begin(), samples.end());
  CHECK(cudaGraphExecDestroy(run));
  CHECK(cudaGraphDestroy(graph));
  return samples[samples.size() / 2];
}

enum Kind { kPlain, kCooperative, kDependent };

template <class... A>
void launch(Kind kind, void (*kernel)(A...), int grid, int block, A... args) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute;
  config.gridDim = grid, config.blockDim = block, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = kind == kPlain ? 0 : 1;
  if (kind == kCooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (kind == kDependent) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

template <class Barrier>
void time_barrier(const char* name, int grid, int block, unsigned* state) {
  auto of = [&](int times) {
    return microseconds([&] { launch(kCooperative, barriers<Barrier>, grid, block, state, times); });
  };
  double one = of(1), five = of(5);
  std::printf("  %-14s kernel of one %5.2f, each further one %5.2f\n", name, one, (five - one) / 4);
  CHECK(cudaMemset(state, 0, 1 << 16));
}

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const long n = (48l << 20) / 16;
  float4 *x, *y;
  float *partials, *joined, *out;
  unsigned* state;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMalloc(&swept, kSweep * 16));
  CHECK(cudaMalloc(&swept_out, 4));
  CHECK(cudaMemset(swept, 0, kSweep * 16));
  CHECK(cudaMalloc(&state, 1 << 16));
  CHECK(cudaMemset(state, 0, 1 << 16));
  CHECK(cudaMalloc(&x, n * 16));
  CHECK(cudaMalloc(&y, n * 16));
  CHECK(cudaMemset(x, 0, n * 16));
  CHECK(cudaMalloc(&partials, 528l * 8192 * 4));
  CHECK(cudaMalloc(&joined, 528l * 8192 * 4));
  CHECK(cudaMalloc(&out, 8192 * 4));

  const std::vector<std::pair<int, int>> grids = {{132, 1024}, {264, 512}, {528, 256}};
  for (auto [grid, block] : grids) {
    double plain = microseconds([&, g = grid, b = block] { launch(kPlain, nothing, g, b); });
    double cooperative = microseconds([&, g = grid, b = block] { launch(kCooperative, nothing, g, b); });
    std::printf("%d x %d: empty kernel %.2f, cooperative %.2f\n", grid, block, plain, cooperative);
    time_barrier<TwoCounters>("two counters", grid, block, state);
    time_barrier<Generation>("generation", grid, block, state);
    time_barrier<OneCounter>("one counter", grid, block, state);
  }
  for (int columns : {512, 2048, 8192}) {
    for (auto shape : grids) {
      int grid = shape.first, block = shape.second, finishers = columns / 32;
      const float4* from = x;
      const float* made = partials;
      auto second = [&](Kind kind, auto first, auto next) {
        return microseconds([&] {
          launch(kPlain, first, grid, block, from, y, n, partials, columns);
          launch(kind, next, finishers, kFinishThreads, made, grid, columns, out);
        });
      };
      double alone = microseconds([&] { launch(kPlain, main_kernel, grid, block, from, y, n, partials, columns); });
      double kernel = second(kPlain, main_kernel, finish_kernel);
      double early = second(kDependent, main_early, finish_dependent);
      double late = second(kDependent, main_late, finish_dependent);
      auto behind = [&](auto fused) {
        double us = microseconds(
            [&] { launch(kCooperative, fused, grid, block, from, y, n, partials, columns, out, state); });
        CHECK(cudaMemset(state, 0, 1 << 16));
        return us;
      };
      double two = behind(behind_barrier<TwoCounters>), one = behind(behind_barrier<OneCounter>);
      int group = grid <= 132 ? 12 : grid <= 264 ? 16 : 24;
      double blocks = microseconds(
          [&] { launch(kPlain, last_block, grid, block, from, y, n, partials, columns, joined, out, state, group); });
      std::printf("%d columns, %d x %d: main %.2f, with finish kernel %.2f, dependent early %.2f late %.2f,"
                  " behind barrier of two counters %.2f, of one %.2f, last blocks %.2f\n",
          columns, grid, block, alone, kernel, early, late, two, one, blocks);
      CHECK(cudaMemset(state, 0, 1 << 16));
    }
  }
  CHECK(cudaDeviceSynchronize());
  return 0;
}
