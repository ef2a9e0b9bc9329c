// Linears whose bits depend on nothing but the row, the weight and the bias: y = x W^T + b in bfloat16 or float32.
//
// Every element of y is summed over the inputs from first to last, in steps that the level of instructions fixes,
// whatever the number of rows, the row's place among them and the number of threads: these only choose which sums
// share registers. One library has one level, the compiler's target, since they add differently:
//
//   AMX              bfloat16 by tiles (tiles.h), float32 by fused multiply-add
//   AVX512_BF16      bfloat16 in pairs by vdpbf16ps, float32 by fused multiply-add
//   AVX-512, AVX2    bfloat16 widened, both by fused multiply-add
//   any other        bfloat16 widened, both by a multiplication and an addition
//
// A product of two bfloat16 is exact in float32, so that all levels but the first two give the same bits in bfloat16,
// and all but the last in float32.
//
// Without tiles, each element has one float32 accumulator. A step takes one input in float32 and two in bfloat16, so
// that what it takes of a row has 32 bits, a word. Weights are packed in panels of PANEL outputs, (steps, PANEL) words
// each. A weight that has to stay as it is (a tied embedding) is packed panel by panel whenever it is used, into a
// thread's own memory: the sums are the same.

#include <initializer_list>

#include "quantised.h"
#include "vectors.h"

#if defined(__AMX_BF16__) || defined(PAGESTREAM_TILE_MODEL)
#include "quantised_tiles.h"
#endif

namespace {

template <class T>
struct KernelOf {
  using Type = VectorProduct<T>;
};
#if defined(__AMX_BF16__) || defined(PAGESTREAM_TILE_MODEL)
template <>
struct KernelOf<bf16> {
  using Type = TileProduct;
};
#endif
template <class T>
using Kernel = typename KernelOf<T>::Type;

template <class T, Storage S>
struct QuantisedKernelOf {
  using Type = QuantisedProduct<T, S>;
};
#if defined(__AMX_BF16__) || defined(PAGESTREAM_TILE_MODEL)
template <Storage S>
struct QuantisedKernelOf<bf16, S> {
  using Type = QuantisedTileProduct<S>;
};
#endif

// Calls visit with the product of a storage.
template <class T, class Visit>
auto with_storage(int storage, Visit visit) {
  switch (storage) {
    case FLOAT8: return visit(typename QuantisedKernelOf<T, FLOAT8>::Type{});
    case INT4: return visit(typename QuantisedKernelOf<T, INT4>::Type{});
    case TABLE4: return visit(typename QuantisedKernelOf<T, TABLE4>::Type{});
    case NVFP4: return visit(typename QuantisedKernelOf<T, NVFP4>::Type{});
    case MXFP4: return visit(typename QuantisedKernelOf<T, MXFP4>::Type{});
    default: return visit(typename QuantisedKernelOf<T, INT8>::Type{});
  }
}

// Rows that are sorted by weight, so that those of weight i end before row ends[i]: each meets its own.
template <class T>
struct Groups {
  const uint32_t* const* packed;
  const T* const* biases;  // of each weight, or null
  const int32_t* ends;
  int64_t count;
};

// As `linear_*`: `kernel` has all rows, and neither weight nor bias. Rows beyond the last end become zeros.
template <class T, class AnyKernel>
int64_t run_groups(AnyKernel kernel, const Groups<T>& groups, int64_t scratch_words) {
  const AnyKernel whole = kernel;
  int64_t needed = 0;
  for (const bool runs : {false, true}) {
    for (int64_t i = 0, begin = 0; i < groups.count; begin = groups.ends[i++]) {
      kernel.rows = groups.ends[i] - begin;
      if (!kernel.rows) continue;
      kernel.x = whole.x + begin * whole.inputs;
      kernel.out = whole.out + begin * whole.columns();
      kernel.packed = groups.packed[i];
      kernel.bias = groups.biases ? groups.biases[i] : nullptr;
      if (runs)
        kernel.run();
      else
        needed = std::max(needed, kernel.scratch_words());
    }
    if (needed > scratch_words) return needed;
  }
  const int64_t end = groups.count ? groups.ends[groups.count - 1] : 0;
  std::fill(whole.out + end * whole.columns(), whole.out + whole.rows * whole.columns(), T{});
  return 0;
}

}  // namespace

// See the fields of `Product`. `panel_width_*` is what a gated product's gates must be a multiple of. `linear_*` returns
// 0, or without having done anything the words of scratch that it needs.
#define PAGESTREAM_EXPORT(T, NAME)                                                                                  \
  int64_t panel_width_##NAME() { return Kernel<T>::PANEL_WIDTH; }                                                   \
  int64_t packed_words_##NAME(int64_t inputs, int64_t outputs) {                                                    \
    return Kernel<T>::packed_words(inputs, outputs);                                                                \
  }                                                                                                                 \
  void pack_##NAME(uint32_t* packed, const T* weight, int64_t inputs, int64_t outputs, int threads) {               \
    Kernel<T>::pack_weight(packed, weight, inputs, outputs, threads);                                               \
  }                                                                                                                 \
  int64_t linear_##NAME(T* out, const T* x, const T* weight, const uint32_t* packed, const T* bias,                 \
                        uint32_t* scratch, int64_t scratch_words, int64_t rows, int64_t inputs, int64_t outputs,    \
                        int epilogue, int threads) {                                                                \
    const Kernel<T> kernel{                                                                                         \
        {out, x, weight, packed, bias, scratch, rows, inputs, outputs, Epilogue(epilogue), threads}};               \
    if (kernel.scratch_words() > scratch_words) return kernel.scratch_words();                                      \
    kernel.run();                                                                                                   \
    return 0;                                                                                                       \
  }                                                                                                                 \
  int64_t grouped_linear_##NAME(T* out, const T* x, const uint32_t* const* packed, const T* const* biases,          \
                                const int32_t* ends, int64_t count, uint32_t* scratch, int64_t scratch_words,       \
                                int64_t rows, int64_t inputs, int64_t outputs, int epilogue, int threads) {         \
    const Kernel<T> kernel{                                                                                         \
        {out, x, nullptr, nullptr, nullptr, scratch, rows, inputs, outputs, Epilogue(epilogue), threads}};          \
    return run_groups<T>(kernel, {packed, biases, ends, count}, scratch_words);                                     \
  }

#define PAGESTREAM_EXPORT_QUANTISED(T, NAME)                                                                        \
  int64_t quantised_linear_##NAME(T* out, const T* x, const uint32_t* packed, const T* bias, uint32_t* scratch,     \
                                  int64_t scratch_words, int64_t rows, int64_t inputs, int64_t outputs,             \
                                  int64_t group_inputs, int storage, int epilogue, int threads) {                   \
    const Product<T> arguments{out,  x,      nullptr, packed,             bias,   scratch,                          \
                               rows, inputs, outputs, Epilogue(epilogue), threads};                                 \
    return with_storage<T>(storage, [&](auto product) -> int64_t {                                                  \
      static_cast<Product<T>&>(product) = arguments;                                                                \
      product.group_inputs = group_inputs;                                                                          \
      if (product.scratch_words() > scratch_words) return product.scratch_words();                                  \
      product.run();                                                                                                \
      return 0;                                                                                                     \
    });                                                                                                             \
  }                                                                                                                 \
  int64_t grouped_quantised_linear_##NAME(T* out, const T* x, const uint32_t* const* packed, const T* const* biases,\
                                          const int32_t* ends, int64_t count, uint32_t* scratch,                    \
                                          int64_t scratch_words, int64_t rows, int64_t inputs, int64_t outputs,     \
                                          int64_t group_inputs, int storage, int epilogue, int threads) {           \
    const Product<T> arguments{out,  x,      nullptr, nullptr,            nullptr, scratch,                         \
                               rows, inputs, outputs, Epilogue(epilogue), threads};                                 \
    return with_storage<T>(storage, [&](auto product) -> int64_t {                                                  \
      static_cast<Product<T>&>(product) = arguments;                                                                \
      product.group_inputs = group_inputs;                                                                          \
      return run_groups<T>(product, {packed, biases, ends, count}, scratch_words);                                  \
    });                                                                                                             \
  }

extern "C" {
// Asks the system for what the level needs; returns whether this process has it.
int acquire() {
#if defined(__AMX_BF16__) && !defined(PAGESTREAM_TILE_MODEL)
  return acquire_tiles();
#else
  return 1;
#endif
}
PAGESTREAM_EXPORT(float, float32)
PAGESTREAM_EXPORT(bf16, bfloat16)

// See quantised.h. `group_inputs` share a scale; `storage` is a `Storage`.
int64_t quantised_panel_width() { return WIDE_PANEL; }

int64_t quantised_words(int64_t inputs, int64_t outputs, int64_t group_inputs, int storage) {
  return with_storage<float>(storage, [&](auto product) {
    product.inputs = inputs;
    product.group_inputs = group_inputs;
    return ceil_div(outputs, WIDE_PANEL) * product.panel_words();
  });
}

void pack_quantised(uint32_t* packed, const uint8_t* values, const uint8_t* scales, const uint8_t* zeros,
                    const float* table, const float* factors, int64_t inputs, int64_t outputs, int64_t group_inputs,
                    int storage, int threads) {
  with_storage<float>(storage, [&](auto product) {
    product.inputs = inputs;
    product.outputs = outputs;
    product.group_inputs = group_inputs;
    product.threads = threads;
    product.pack_weight(packed, values, scales, zeros, table, factors);
  });
}
PAGESTREAM_EXPORT_QUANTISED(float, float32)
PAGESTREAM_EXPORT_QUANTISED(bf16, bfloat16)
}
