// What torch built for CPUs has none of for CUDA: a device guard, which it asks for wherever a device is named, and
// hooks, which its autograd engine asks for before it takes a gradient on a GPU. Both do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>

static const c10::Device first(c10::DeviceType::CUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return first; }
  c10::Device getDevice() const override { return first; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, first); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, first); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// torch has made its own hooks, for no CUDA, as it was imported, and asks nobody again: these take their place.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
static auto* placed = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
