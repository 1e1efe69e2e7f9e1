// Wraps the C library's calls by which fastamp changes files below one folder (LD_PRELOAD): open,
// write, fsync, rename, unlink, mkdir. They are counted; at one of them a fault strikes. A journal
// records what would be on the disk after a loss of power: every change of a folder, and a copy of
// each file that is synced.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string>

namespace {

enum Kind { kCount, kKill, kFail, kFull, kSignal };

std::string root, journal;  // empty: not armed
int journal_fd = -1, kind = kCount, number = 0;
long at = 0, length = 1;
bool is_cut = false;  // a write that is struck first has written some of its bytes
std::atomic<long> calls{0}, copies{0};
thread_local bool is_inside = false;

template <class Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define NEXT(name) static const auto real = next(&name, #name)

std::string link_target(const std::string& link) {
  char found[4096];
  const ssize_t n = readlink(link.c_str(), found, sizeof found);
  return n > 0 ? std::string(found, static_cast<size_t>(n)) : std::string();
}

std::string path_of(int fd) { return link_target("/proc/self/fd/" + std::to_string(fd)); }

std::string absolute(const char* path) {
  return path[0] == '/' ? path : link_target("/proc/self/cwd") + "/" + path;
}

bool is_watched(const std::string& path) {
  return journal_fd >= 0 && !is_inside && path.size() > root.size() &&
         path.compare(0, root.size(), root) == 0 && path[root.size()] == '/';
}

bool is_watched_or_root(const std::string& path) {
  return is_watched(path) || (journal_fd >= 0 && !is_inside && path == root);
}

void note(const std::string& line) {
  const std::string whole = line + "\n";
  const int before = errno;
  syscall(SYS_write, journal_fd, whole.data(), whole.size());
  errno = before;
}

/// Copy a file into the journal, and return the copy's name.
std::string copy(const std::string& path) {
  is_inside = true;
  const std::string name =
      journal + "." + std::to_string(getpid()) + "." + std::to_string(copies++);
  const int from = open(path.c_str(), O_RDONLY), to = open(name.c_str(), O_WRONLY | O_CREAT, 0600);
  char buffer[1 << 16];
  ssize_t n;
  while ((n = read(from, buffer, sizeof buffer)) > 0) syscall(SYS_write, to, buffer, n);
  close(from);
  close(to);
  is_inside = false;
  return name;
}

[[noreturn]] void die() {
  kill(number != 0 ? 0 : getpid(), SIGKILL);  // the whole group, or this process
  for (;;) pause();
}

enum Verdict { kGoOn, kRefuse, kCut };

/// Count a call, and strike if it is the one. kCut is for writes: some of the bytes are written.
Verdict strike(const char* call, bool needs_space, bool writes) {
  const long n = ++calls;
  if (kind == kCount || n < at || n >= at + length || (kind == kFull && !needs_space)) return kGoOn;
  note("struck\t" + std::string(call));
  const bool cuts = writes && is_cut && n == at;
  if (kind == kKill && !cuts) die();
  if (kind == kSignal) {
    kill(getpid(), number);
    return kGoOn;
  }
  errno = kind == kFull ? ENOSPC : number;
  return cuts ? kCut : kRefuse;
}

/// Write up to the last border of a page: where kernels stop, when they are killed or out of space.
ssize_t write_cut(int fd, const void* data, size_t n) {
  const int refusal = errno;
  struct stat status;
  fstat(fd, &status);
  const bool appends = (fcntl(fd, F_GETFL) & O_APPEND) != 0;
  const off_t start = appends ? status.st_size : lseek(fd, 0, SEEK_CUR);
  const off_t border = (start + static_cast<off_t>(n) - 1) / 4096 * 4096;
  const ssize_t done = border > start ? syscall(SYS_write, fd, data, border - start) : -1;
  if (kind == kKill) die();
  if (done < 0) errno = refusal;
  return done;
}

template <class Real>
int open_any(Real real, const std::string& path, int flags) {
  const bool changes = (flags & (O_CREAT | O_TRUNC)) != 0 && (flags & O_TMPFILE) != O_TMPFILE;
  if (!changes || !is_watched(path)) return real();
  struct stat status;
  const bool is_new = lstat(path.c_str(), &status) != 0;
  if (strike("open", is_new, false) == kRefuse) return -1;
  const int fd = real();
  if (fd >= 0 && is_new) note("create\t" + path);
  if (fd >= 0 && !is_new && (flags & O_TRUNC)) note("cut\t" + path);
  return fd;
}

template <class Real>
int change(Real real, const char* call, const std::string& path, bool needs_space = false,
           const std::string& target = "") {
  if (!is_watched(path)) return real();
  if (strike(call, needs_space, false) == kRefuse) return -1;
  const int result = real();
  if (result == 0) note(std::string(call) + "\t" + path + "\t" + target);
  return result;
}

template <class Real>
int sync_any(Real real, int fd) {
  const std::string path = path_of(fd);
  if (!is_watched_or_root(path)) return real();
  if (strike("fsync", false, false) == kRefuse) return -1;
  const int result = real();
  struct stat status;
  if (result == 0 && fstat(fd, &status) == 0)
    note(S_ISDIR(status.st_mode) ? "syncdir\t" + path : "sync\t" + path + "\t" + copy(path));
  return result;
}

}  // namespace

extern "C" {

/// Watch a folder from now on; `number` is the error, the signal, or 1 to kill the process group.
void faults_arm(const char* folder, const char* notes, int kind_, long at_, long length_,
                int number_, int cut) {
  root = folder;
  journal = notes;
  kind = kind_;
  number = number_;
  at = at_;
  length = length_;
  is_cut = cut != 0;
  calls = 0;
  is_inside = true;
  journal_fd = fcntl(open(notes, O_WRONLY | O_CREAT | O_APPEND, 0600), F_DUPFD_CLOEXEC, 500);
  is_inside = false;
}

long faults_calls() { return calls; }

#define OPEN(name)                                                                                 \
  int name(const char* path, int flags, ...) {                                                     \
    NEXT(name);                                                                                    \
    va_list args;                                                                                  \
    va_start(args, flags);                                                                         \
    const mode_t mode = va_arg(args, mode_t);                                                      \
    va_end(args);                                                                                  \
    return open_any([&] { return real(path, flags, mode); }, journal_fd < 0 ? "" : absolute(path), \
                    flags);                                                                        \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void* data, size_t n) {
  if (journal_fd >= 0 && is_watched(path_of(fd))) {
    const Verdict verdict = strike("write", true, true);
    if (verdict == kRefuse) return -1;
    if (verdict == kCut) return write_cut(fd, data, n);
  }
  return syscall(SYS_write, fd, data, n);
}

int fsync(int fd) {
  NEXT(fsync);
  return journal_fd < 0 ? real(fd) : sync_any([&] { return real(fd); }, fd);
}

int rename(const char* from, const char* to) noexcept {
  NEXT(rename);
  if (journal_fd < 0) return real(from, to);
  return change([&] { return real(from, to); }, "rename", absolute(from), true, absolute(to));
}

int unlink(const char* path) noexcept {
  NEXT(unlink);
  if (journal_fd < 0) return real(path);
  return change([&] { return real(path); }, "remove", absolute(path));
}

int mkdir(const char* path, mode_t mode) noexcept {
  NEXT(mkdir);
  if (journal_fd < 0) return real(path, mode);
  return change([&] { return real(path, mode); }, "mkdir", absolute(path), true);
}

}  // extern "C"
