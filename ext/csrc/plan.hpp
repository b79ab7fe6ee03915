// A list of copies arranged once and run many times.
//
// On the CPU every slice is one operation of the worker. With a device, copy engines move the bytes; they take a few
// microseconds per copy whatever its size, and convert nothing. So small slices travel together:
//
//   device to host:  pack kernel -> staging (device) -> one copy -> bounce (host) -> scatter by the worker
//   host to device:  gather by the worker -> bounce -> one copy -> staging -> unpack kernel
//
// Larger ones that are strided or converted, but contiguous on the host, need no bounce there: a kernel brings them to, or
// takes them from, a place of their own in staging, and a copy engine does the rest.
//
// Copies within the host are made with the gathering: a fence waits for what the worker queues, and the optimizer that
// follows it may overwrite a source on the host (Adam's step counts, for one).
//
// Copies are grouped into chunks of at most `chunk_nbytes`, the unit of pacing. No copy that is queued touches two
// separately registered pieces of host memory, which the driver would refuse.
//
// A plan may be run into several places: destinations are then offsets, and each job has the address that they count
// from. Everything else in the plan is the same for all of them. Where pieces begin depends on that address, so copies
// are cut there as they are queued.
#pragma once
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "slice.hpp"

namespace moe_ckpt {

constexpr uint64_t kUnitNbytes = 32 << 10;  // of one block of a kernel: small enough that thousands balance
constexpr uint64_t kAlignment = 64;         // of a slice in staging: any type, and whole sectors of memory
constexpr int32_t kAlone = 2;               // `is_relative` of what has a place of its own there

// Host memory registered in pieces, from `base` on. Mirrors `Pieces` of _prototypes.py.
struct Pieces {
  uint64_t base, end, piece_nbytes;
};

// Mirrors `PlanOptions` of _prototypes.py.
struct PlanOptions {
  uint64_t chunk_nbytes;
  uint64_t chunk_copies;  // of one chunk, at most
  uint64_t pack_below;    // bytes; smaller slices travel together
  int32_t has_device;
  int32_t bfloat16_nan;  // what a NaN becomes on the CPU, where torch's answer depends on the processor
};

struct Chunk {
  size_t begin, end;
};

class Plan {
 public:
  Plan(const Slice* slices, size_t num_slices, const PlanOptions& options, const Pieces* pieces, size_t num_pieces)
      : options_(options), pieces_(pieces, pieces + num_pieces) {
    if (!options_.chunk_nbytes || !options_.chunk_copies) throw std::invalid_argument("a chunk must hold something");
    for (size_t index = 0; index < num_slices; ++index)
      if (slices[index].rows && slices[index].count) add(slices[index]);
    add_bounced();
    cut_chunks();
  }

  // Memory for the slices that travel by staging: staging_nbytes() on the device and bounce_nbytes() on the host.
  void attach(uint64_t staging, uint64_t bounce) {
    if (attached_) throw std::logic_error("memory was attached before");
    for (auto& unit : pack) unit.dst += unit.is_relative ? staging : 0;
    for (auto& unit : unpack) unit.src += staging;
    for (size_t index = 0; index < first_bounced_; ++index)
      if (copies[index].is_relative) staged_side(copies[index]) += staging;
    for (auto& op : gather) op.dst += op.is_relative ? bounce : 0;
    for (auto& op : scatter) op.src += bounce;
    for (size_t index = first_bounced_; index < copies.size(); ++index) {
      auto& copy = copies[index];
      const bool outward = copy.dst_space == Space::kPinned;
      copy.dst += outward ? bounce : staging;
      copy.src += outward ? staging : bounce;
    }
    attached_ = true;
  }
  bool ready() const { return attached_ || !staging_nbytes(); }
  uint64_t bounce_nbytes() const { return outward_ + inward_; }
  uint64_t staging_nbytes() const { return bounce_nbytes() + alone_; }
  uint64_t nbytes() const { return nbytes_; }
  int32_t bfloat16_nan() const { return options_.bfloat16_nan; }

  // A copy of host memory by the worker, into the place that a job has.
  static Slice moved(Slice op, uint64_t base) {
    op.dst += op.is_relative ? 0 : base;
    return op;
  }

  // Copies `chunk` as they are queued for a job whose destinations count from `base`.
  void place(const Chunk& chunk, uint64_t base, std::vector<Slice>* placed) const {
    placed->clear();
    for (size_t index = chunk.begin; index < chunk.end; ++index) {
      Slice rest = copies[index];
      if (index < first_bounced_) rest.dst += base;
      if (pieces_.empty() || rest.rows > 1 || rest.cast != Cast::kBytes) {
        placed->push_back(rest);
        continue;
      }
      while (rest.count) {
        placed->push_back(rest);
        const uint64_t taken = std::min({rest.count, room_in_piece(rest.src), room_in_piece(rest.dst)});
        placed->back().count = taken;
        rest.count -= taken;
        rest.src += taken;
        rest.dst += taken;
      }
    }
  }

  std::vector<Slice> gather;   // host, before the copies
  std::vector<Slice> pack;     // device, before the copies
  std::vector<Slice> copies;   // in chunks
  std::vector<Chunk> chunks;
  std::vector<Slice> unpack;   // device, after the copies
  std::vector<Slice> scatter;  // host, after the copies
  // Where the units of `pack` and `unpack`, in this order, lie in the memory of the device; set by the caller.
  uint64_t units_on_device = 0;

 private:
  void add(Slice slice) {
    join_rows(slice);
    nbytes_ += dst_nbytes(slice);
    const bool from_device = slice.src_space == Space::kDevice, to_device = slice.dst_space == Space::kDevice;
    const bool is_small = std::max(src_nbytes(slice), dst_nbytes(slice)) < options_.pack_below;
    if (!options_.has_device) {
      add_copy(slice);
    } else if (!from_device && !to_device) {
      if (slice.cast != Cast::kBytes) throw std::invalid_argument("a copy within the host cannot convert on a device");
      gather.push_back(slice);
    } else if (!is_small && slice.rows == 1 && slice.cast == Cast::kBytes) {
      add_copy(slice);
    } else if (from_device && to_device) {
      add_units(pack, slice);
    } else if (!is_small && is_contiguous_on_host(slice, from_device)) {
      send_alone(slice, from_device);
    } else if (from_device) {
      send_together(slice, pack, scatter, outward_, dst_nbytes(slice), dst_itemsize(slice.cast));
    } else {
      send_together(slice, gather, unpack, inward_, src_nbytes(slice), src_itemsize(slice.cast));
    }
  }

  // Rows that follow each other without gap on both sides are one row.
  static void join_rows(Slice& slice) {
    const auto src_row = static_cast<int64_t>(slice.count * src_itemsize(slice.cast));
    const auto dst_row = static_cast<int64_t>(slice.count * dst_itemsize(slice.cast));
    if (slice.rows > 1 && slice.src_stride == src_row && slice.dst_stride == dst_row) {
      slice.count *= slice.rows;
      slice.rows = 1;
    }
  }

  // `first` brings the slice into the shared memory as contiguous elements, `second` takes it from there. Offsets are
  // relative until `attach`. The side on the device converts; the other sees bytes.
  void send_together(const Slice& slice, std::vector<Slice>& first, std::vector<Slice>& second, uint64_t& used,
                     uint64_t nbytes, uint64_t itemsize) {
    const auto row = static_cast<int64_t>(slice.count * itemsize);
    Slice in = slice, out = slice;
    in.dst = out.src = used;
    in.is_relative = out.is_relative = 1;
    in.dst_stride = out.src_stride = row;
    const bool packs = &first == &pack;
    Slice& host = packs ? out : in;
    host.cast = Cast::kBytes;
    host.count = slice.count * itemsize;
    packs ? add_units(first, in) : first.push_back(in);
    packs ? second.push_back(out) : add_units(second, out);
    used += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  static bool is_contiguous_on_host(const Slice& slice, bool from_device) {
    const uint64_t itemsize = from_device ? dst_itemsize(slice.cast) : src_itemsize(slice.cast);
    const int64_t stride = from_device ? slice.dst_stride : slice.src_stride;
    return slice.rows == 1 || stride == static_cast<int64_t>(slice.count * itemsize);
  }

  // By a place of its own in staging, behind those that are shared: the kernel's side converts and sees rows, the copy
  // sees bytes. Offsets are relative until `attach`.
  void send_alone(const Slice& slice, bool outward) {
    const uint64_t nbytes = outward ? dst_nbytes(slice) : src_nbytes(slice);
    const auto row = static_cast<int64_t>(nbytes / slice.rows);
    Slice unit = slice, copy = slice;
    unit.is_relative = copy.is_relative = kAlone;
    (outward ? unit.dst : unit.src) = staged_side(copy) = alone_;
    (outward ? unit.dst_stride : unit.src_stride) = row;
    copy.cast = Cast::kBytes;
    copy.count = nbytes;
    copy.rows = 1;
    add_units(outward ? pack : unpack, unit);
    add_copy(copy);
    alone_ += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Where a copy by staging touches it.
  static uint64_t& staged_side(Slice& copy) { return copy.src_space == Space::kDevice ? copy.src : copy.dst; }

  static void add_units(std::vector<Slice>& units, const Slice& slice) {
    const uint64_t itemsize = std::max(src_itemsize(slice.cast), dst_itemsize(slice.cast));
    const uint64_t rows = std::clamp<uint64_t>(kUnitNbytes / (slice.count * itemsize), 1, slice.rows);
    const uint64_t count = std::min(slice.count, kUnitNbytes / itemsize);
    for (uint64_t row = 0; row < slice.rows; row += rows)
      for (uint64_t start = 0; start < slice.count; start += count) {
        Slice unit = slice;
        unit.rows = std::min(rows, slice.rows - row);
        unit.count = std::min(count, slice.count - start);
        unit.src += row * slice.src_stride + start * src_itemsize(slice.cast);
        unit.dst += row * slice.dst_stride + start * dst_itemsize(slice.cast);
        units.push_back(unit);
      }
  }

  // One copy, cut to chunks; what continues the copy before it in both places becomes part of that.
  void add_copy(const Slice& slice) {
    if (slice.rows > 1) {
      add_row_groups(slice);
      return;
    }
    Slice rest = slice;
    const uint64_t src_size = src_itemsize(rest.cast), dst_size = dst_itemsize(rest.cast);
    while (rest.count) {
      const bool whole_bytes = rest.cast == Cast::kBytes;
      uint64_t room = std::max<uint64_t>(options_.chunk_nbytes / std::max(src_size, dst_size), 1);
      Slice* last = copies.empty() ? nullptr : &copies.back();
      const bool continues = last && whole_bytes && last->cast == Cast::kBytes && last->rows == 1 &&
                             last->src + last->count == rest.src && last->dst + last->count == rest.dst &&
                             last->src_space == rest.src_space &&
                             last->is_relative == rest.is_relative && last->dst_space == rest.dst_space &&
                             last->count < options_.chunk_nbytes;
      if (continues) room = std::min(room, options_.chunk_nbytes - last->count);
      const uint64_t taken = std::min(room, rest.count);
      if (continues) {
        last->count += taken;
      } else {
        copies.push_back(rest);
        copies.back().count = taken;
      }
      rest.count -= taken;
      rest.src += taken * src_size;
      rest.dst += taken * dst_size;
    }
  }

  void add_row_groups(const Slice& slice) {
    const uint64_t row_nbytes = slice.count * std::max(src_itemsize(slice.cast), dst_itemsize(slice.cast));
    const uint64_t rows = std::clamp<uint64_t>(options_.chunk_nbytes / row_nbytes, 1, slice.rows);
    for (uint64_t row = 0; row < slice.rows; row += rows) {
      Slice group = slice;
      group.rows = std::min(rows, slice.rows - row);
      group.src += row * slice.src_stride;
      group.dst += row * slice.dst_stride;
      copies.push_back(group);
    }
  }

  // The two regions of the shared memory, as copies between staging and bounce.
  void add_bounced() {
    first_bounced_ = copies.size();
    const auto add_region = [&](uint64_t begin, uint64_t nbytes, Space dst, Space src) {
      for (uint64_t start = 0; start < nbytes; start += options_.chunk_nbytes) {
        const uint64_t size = std::min(options_.chunk_nbytes, nbytes - start);
        copies.push_back({begin + start, begin + start, size, 1, 0, 0, Cast::kBytes, dst, src, 0});
      }
    };
    add_region(0, outward_, Space::kPinned, Space::kDevice);
    add_region(outward_, inward_, Space::kDevice, Space::kPinned);
    for (auto& op : gather) op.dst += op.is_relative ? outward_ : 0;
    for (auto& unit : pack) unit.dst += unit.is_relative == kAlone ? bounce_nbytes() : 0;
    for (auto& unit : unpack) unit.src += unit.is_relative == kAlone ? bounce_nbytes() : outward_;
    for (size_t index = 0; index < first_bounced_; ++index)
      if (copies[index].is_relative) staged_side(copies[index]) += bounce_nbytes();
  }

  void cut_chunks() {
    uint64_t nbytes = 0;
    for (size_t index = 0; index < copies.size(); ++index) {
      const uint64_t size = std::max(src_nbytes(copies[index]), dst_nbytes(copies[index]));
      if (chunks.empty() || nbytes + size > options_.chunk_nbytes ||
          chunks.back().end - chunks.back().begin >= options_.chunk_copies) {
        chunks.push_back({index, index});
        nbytes = 0;
      }
      chunks.back().end = index + 1;
      nbytes += size;
    }
  }

  const Pieces* pieces_at(uint64_t address) const {
    for (const auto& pieces : pieces_)
      if (address >= pieces.base && address < pieces.end) return &pieces;
    return nullptr;
  }
  uint64_t room_in_piece(uint64_t address) const {
    const Pieces* pieces = pieces_at(address);
    if (!pieces) return std::numeric_limits<uint64_t>::max();
    return pieces->piece_nbytes - (address - pieces->base) % pieces->piece_nbytes;
  }

  PlanOptions options_;
  std::vector<Pieces> pieces_;
  uint64_t outward_ = 0, inward_ = 0, alone_ = 0, nbytes_ = 0;
  size_t first_bounced_ = 0;
  bool attached_ = false;
};

}  // namespace moe_ckpt
