// Reads of memory that its owner may free, or whose file another process may cut, meanwhile.
#pragma once

namespace fastamp {

/// Calls `read(argument)`; returns false where it met memory that is not there. Then the call was
/// left in the middle, without a destructor: `read` owns nothing and holds no lock.
bool read_guarded(void (*read)(void* argument), void* argument);

}  // namespace fastamp
