// Reads of memory that its owner may free meanwhile, or whose file another process may truncate.
#pragma once

namespace fastamp {

/// Calls `read(argument)`; returns false if it read memory that no longer exists. Then the call was
/// left in the middle, without destructors: `read` must own nothing and hold no lock.
bool read_guarded(void (*read)(void* argument), void* argument);

}  // namespace fastamp
