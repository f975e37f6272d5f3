// Order of work on the stand-in's streams, and records of what a real GPU would punish.
//
// Kernels do nothing here: numerics.py computes each operation's result on the CPU when it is issued. Results
// are therefore right even where a stream forgot to wait for another one. So that such a fault shows, each
// stream has a vector clock, and each range of memory remembers who wrote and who read it, and when.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

using Lock = std::unique_lock<std::mutex>;
extern std::mutex& state_mutex;           // guards all state of the stand-in but a communicator's queue

// Holds the mutex. Hazards that are found meanwhile are recorded after it is released: looking for the place
// in the program needs Python's lock, which another thread may hold while it waits for the mutex.
struct Guard : Lock {
    Guard() : Lock(state_mutex) {}
    ~Guard();
};
extern std::condition_variable& changed;  // notified when an operation of NCCL ends

// An operation of NCCL, which ends only when its peers have taken part.
struct Work {
    bool done = false;
};
using Pending = std::vector<std::shared_ptr<Work>>;

// A copy between the device and pinned host memory. The bytes are taken from the source when the copy is
// issued; they arrive, or the source is checked for changes, only when the host has waited for the copy.
struct HostCopy {
    void* destination;
    const void* source;
    std::vector<char> bytes;
    bool to_host;
    bool done = false;
};
using HostCopies = std::vector<std::shared_ptr<HostCopy>>;

using Clock = std::vector<long>;  // entry s: how many of stream s's operations are known to have ended

struct Graph {
    std::vector<std::function<void()>> copies;  // the nodes that change memory
    size_t nodes = 0;
};

struct Stream {
    int index = 0, device = 0;
    Clock clock;
    Pending pending;
    HostCopies host_copies;
    Graph* graph = nullptr;  // what is captured into, if the stream captures
    bool capture_failed = false;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    unsigned long long capture_id = 0;
    std::thread::id owner;  // the thread that began the capture
};

struct Event {
    Clock clock;
    Pending pending;
    HostCopies host_copies;
    Graph* graph = nullptr;  // the capture that it was recorded in
    double at_ms = 0;
};

double now_ms();
const char* setting(const char* name, const char* otherwise);  // an environment variable

// Append a line "kind, what, place in the program" to this process's file of records, if STANDIN_DIR is set.
// With the place, the mutex must be free.
void record(const char* kind, const std::string& what, bool with_place = false);

// Get the Stream of a handle; nullptr is the current device's default stream. Needs the lock.
Stream& stream_of(cudaStream_t handle);
Stream& new_stream();

// Issue an operation on a stream: it follows what the stream has waited for, and the host knows to be done.
void issue(Stream& stream);
void add_host_copy(Stream& stream, HostCopy copy);
// Make work that is issued later on the stream follow the event.
void wait_for(Stream& stream, const Event& event);
// Wait until the operations of NCCL have ended. Releases the lock meanwhile.
void finish(Lock& lock, const Pending& pending);
// Have the host wait for all that precedes: the bytes arrive, and later work of any stream follows it.
void synchronize(Lock& lock, Pending pending, HostCopies copies, const Clock& clock);
// Return whether all that precedes an event has ended, and if so let this thread know it.
bool is_done(Event& event);
void deliver(HostCopies copies);

// Record a hazard if the stream has not waited for the last writer of this memory or, before a write, for the
// readers. `what` names the operation.
void access(Stream& stream, const void* begin, size_t bytes, bool writes, const char* what);
void forget(const void* begin, size_t bytes);  // nothing is known of this memory any more

std::vector<Stream*>& all_streams();
extern thread_local int current_device;
int physical_device(int device);  // its number without CUDA_VISIBLE_DEVICES

}  // namespace standin
