// Writing large pieces of a file.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "abi.hpp"
#include "background.hpp"

using namespace moe_ckpt;

// Appends `nbytes` to `file`, `position` bytes long so far, and lets the device begin with them; returns an errno or 0.
MOE_API int32_t moe_append(int32_t file, const uint8_t* bytes, uint64_t nbytes, uint64_t position) {
  try {
    return in_background([&] {
      for (uint64_t done = 0; done < nbytes;) {
        const ssize_t written = write(file, bytes + done, nbytes - done);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        done += static_cast<uint64_t>(written);
      }
#ifdef SYNC_FILE_RANGE_WRITE
      // A hint; what is not on the medium at the end, fsync waits for.
      sync_file_range(file, static_cast<off_t>(position), static_cast<off_t>(nbytes), SYNC_FILE_RANGE_WRITE);
#endif
      return 0;
    });
  } catch (const std::exception&) {
    return ENOMEM;
  }
}
