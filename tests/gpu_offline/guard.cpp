// A device guard that does nothing: torch built for CPUs has none for CUDA, and asks for it wherever a device is named.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
