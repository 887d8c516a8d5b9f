// A GPU that does nothing: its tensors have sizes and addresses and no memory, and an operation makes the tensors that it
// returns. What is left of a program is what it takes of the host.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <atomic>
#include <torch/library.h>

using at::Tensor;
using c10::IntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Generator = std::optional<at::Generator>;
using Format = std::optional<at::MemoryFormat>;

struct Nowhere final : c10::Allocator {
  std::atomic<uintptr_t> next{0x7f0000000000};  // aligned as CUDA's allocations are
  c10::DataPtr allocate(size_t bytes) override {
    auto address = next.fetch_add((bytes / 512 + 1) * 512);
    return {reinterpret_cast<void*>(address), c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return [](void*) {}; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
static Nowhere nowhere;
static const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);

static at::ScalarType type_of(Dtype dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}
static Tensor empty(IntArrayRef size, Dtype dtype, Layout, Device, std::optional<bool>, Format format) {
  return at::detail::empty_generic(size, &nowhere, keys, type_of(dtype), format);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Layout, Device, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &nowhere, keys, type_of(dtype));
}
static Tensor like(const Tensor& x, IntArrayRef size) { return at::empty(size, x.options()); }
static Tensor product(const Tensor& a, const Tensor& b) { return like(a, {a.size(0), b.size(1)}); }
static Tensor& same(Tensor& x) { return x; }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("mm", product);
  // what the host reads of it is 0 or true
  m.impl("copy_", [](Tensor& self, const Tensor&, bool) -> Tensor& {
    return self.is_cpu() ? self.fill_(self.scalar_type() == at::kBool) : self;
  });
  m.impl("zero_", same);
  m.impl("fill_.Scalar", [](Tensor& self, const at::Scalar&) -> Tensor& { return self; });
  m.impl("uniform_", [](Tensor& self, double, double, Generator) -> Tensor& { return self; });
  m.impl("normal_", [](Tensor& self, double, double, Generator) -> Tensor& { return self; });
  m.impl("_local_scalar_dense", [](const Tensor&) { return at::Scalar(0); });
  m.impl("div_.Tensor", [](Tensor& self, const Tensor&) -> Tensor& { return self; });
  m.impl("eq.Tensor", [](const Tensor& x, const Tensor&) { return at::empty(x.sizes(), x.options().dtype(at::kBool)); });
  m.impl("add_.Tensor", [](Tensor& self, const Tensor&, const at::Scalar&) -> Tensor& { return self; });
  m.impl("resize_", [](const Tensor& self, IntArrayRef size, Format) -> const Tensor& {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return self;
  });
  m.impl("_foreach_copy_", [](at::TensorList, at::TensorList, bool) {});
  m.impl("split_with_sizes_copy.out", [](const Tensor&, IntArrayRef, int64_t, at::TensorList) {});
  m.impl("_chunk_cat.out", [](at::TensorList, int64_t, int64_t, Tensor& out) -> Tensor& { return out; });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) -> Tensor& {
           self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
           self.unsafeGetTensorImpl()->set_storage_offset(offset);
           self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
           return self;
         });
}
