// Small, strided and converted slices, many in one launch.
#pragma once
#include <cuda_runtime.h>

#include "slice.hpp"

namespace moe_ckpt {

// Copies `count` units that lie in the memory of the device; all pointers in them lead to the device.
cudaError_t launch_units(const Slice* units_on_device, size_t count, cudaStream_t stream);

}  // namespace moe_ckpt
