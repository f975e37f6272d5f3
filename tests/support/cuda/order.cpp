// Streams' order: waiting, vector clocks, hazards, and the file of records.
#include "order.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace standin {

// State is never destroyed: threads of torch and NCCL still run while the process exits.
std::mutex& state_mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
thread_local int current_device = 0;

static Clock& host_clock = *new Clock;      // what the host has synchronised with, in any thread
static thread_local Clock thread_clock;     // what this thread has found done by a query
static thread_local std::vector<std::string> hazards;  // to be recorded when the mutex is free
static void (*find_place)(char*, int) = nullptr;  // set by numerics.py: writes the place in the program

double now_ms() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(since).count();
}

const char* setting(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

void record(const char* kind, const std::string& what, bool with_place) {
    static FILE* file = [] {
        const char* folder = getenv("STANDIN_DIR");
        std::string path = std::string(folder ? folder : "") + "/" + std::to_string(getpid()) + ".records";
        FILE* opened = folder ? fopen(path.c_str(), "a") : nullptr;
        if (opened) setvbuf(opened, nullptr, _IOLBF, 0);
        return opened;
    }();
    if (!file) return;
    char place[256] = "";
    if (with_place && find_place) find_place(place, sizeof place);
    fprintf(file, "%s\t%s\t%s\n", kind, what.c_str(), place);
}

Guard::~Guard() {
    if (owns_lock()) unlock();
    std::vector<std::string> found;
    found.swap(hazards);
    for (auto& hazard : found) record("HAZARD", hazard, true);
}

// ------------------------------------------------------------ streams
std::vector<Stream*>& all_streams() {
    static auto* streams = new std::vector<Stream*>;
    return *streams;
}

Stream& new_stream() {
    auto* stream = new Stream;
    stream->device = current_device;
    stream->index = all_streams().size();
    all_streams().push_back(stream);
    return *stream;
}

Stream& stream_of(cudaStream_t handle) {
    static auto* defaults = new std::map<int, Stream*>;
    if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return *reinterpret_cast<Stream*>(handle);
    Stream*& stream = (*defaults)[current_device];
    if (!stream) stream = &new_stream();
    return *stream;
}

// ------------------------------------------------------------ clocks
static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

static bool has_seen(const Clock& clock, int stream, long time) {
    return stream < (int)clock.size() && clock[stream] >= time;
}

void issue(Stream& stream) {
    join(stream.clock, host_clock);
    join(stream.clock, thread_clock);
    if ((int)stream.clock.size() <= stream.index) stream.clock.resize(stream.index + 1);
    stream.clock[stream.index]++;
}

// Add what has not ended yet, once, and drop what has.
template <class T>
static void add_unfinished(std::vector<T>& list, const std::vector<T>& more) {
    std::vector<T> all = list, result;
    all.insert(all.end(), more.begin(), more.end());
    for (auto& item : all) {
        bool is_new = std::find(result.begin(), result.end(), item) == result.end();
        if (is_new && !item->done) result.push_back(item);
    }
    list.swap(result);
}

void add_host_copy(Stream& stream, HostCopy copy) {
    add_unfinished(stream.host_copies, {std::make_shared<HostCopy>(std::move(copy))});
}

void wait_for(Stream& stream, const Event& event) {
    join(stream.clock, event.clock);
    add_unfinished(stream.pending, event.pending);
    add_unfinished(stream.host_copies, event.host_copies);
}

void finish(Lock& lock, const Pending& pending) {
    Pending left = pending;  // the stream's own list may change while the lock is free
    for (auto& work : left) changed.wait(lock, [&] { return work->done; });
}

void deliver(HostCopies copies) {
    for (auto& copy : copies) {
        if (copy->done) continue;
        copy->done = true;
        if (copy->to_host)
            memcpy(copy->destination, copy->bytes.data(), copy->bytes.size());
        else if (memcmp(copy->source, copy->bytes.data(), copy->bytes.size()))
            hazards.push_back("pinned memory was changed before its copy to the device had ended");
    }
}

void synchronize(Lock& lock, Pending pending, HostCopies copies, const Clock& clock) {
    Clock known = clock;
    finish(lock, pending);
    deliver(copies);
    join(host_clock, known);
}

// A GPU is behind the host: what was issued just now has not ended, unless the host has waited for it.
static const double LAG_MS = 100;

bool is_done(Event& event) {
    for (auto& work : event.pending)
        if (!work->done) return false;
    bool known = true;
    for (size_t i = 0; i < event.clock.size(); i++) known = known && has_seen(host_clock, i, event.clock[i]);
    if (!known && now_ms() < event.at_ms + LAG_MS) return false;
    deliver(event.host_copies);
    // Only this thread knows: torch's watchdog queries all the time, and tells no other thread the result.
    join(thread_clock, event.clock);
    return true;
}

// ------------------------------------------------------------ hazards
struct Segment {
    uintptr_t end;
    int writer = -1;  // the stream that wrote last; -1: none is known
    long written = 0;  // its clock then
    const char* operation = "";
    std::map<int, long> readers;  // stream: its clock at its last read since then
};

static std::map<uintptr_t, Segment>& segments() {
    static auto* map = new std::map<uintptr_t, Segment>;
    return *map;
}

static void split(uintptr_t at) {
    auto found = segments().upper_bound(at);
    if (found == segments().begin()) return;
    --found;
    if (found->first == at || found->second.end <= at) return;
    Segment right = found->second;
    found->second.end = at;
    segments().emplace(at, right);
}

// Let segments begin at `begin` and end at `end`, without a gap between.
static void cover(uintptr_t begin, uintptr_t end) {
    split(begin);
    split(end);
    uintptr_t at = begin;
    for (auto next = segments().lower_bound(begin); at < end; ++next) {
        uintptr_t gap_end = next == segments().end() ? end : std::min(end, next->first);
        if (at < gap_end) next = segments().emplace(at, Segment{gap_end}).first;
        at = next->second.end;
    }
}

static void report(const Stream& stream, const char* what, const char* did, int other, const char* before) {
    static int count = 0;
    if (count++ >= 50) return;
    std::string here = std::to_string(stream.index), there = std::to_string(other);
    std::string text = std::string(what) + " on stream " + here + " " + did + " stream " + there;
    hazards.push_back(text + " without waiting for it (" + before + ")");
}

void access(Stream& stream, const void* address, size_t bytes, bool writes, const char* what) {
    if (!bytes || stream.graph) return;
    auto begin = reinterpret_cast<uintptr_t>(address);
    uintptr_t end = begin + bytes;
    long time = stream.clock.at(stream.index);
    cover(begin, end);
    for (auto it = segments().lower_bound(begin); it != segments().end() && it->first < end; ++it) {
        Segment& segment = it->second;
        if (segment.writer >= 0 && !has_seen(stream.clock, segment.writer, segment.written))
            report(stream, what, writes ? "overwrites a result of" : "reads a result of", segment.writer,
                   segment.operation);
        if (writes)
            for (auto& [reader, read_at] : segment.readers)
                if (!has_seen(stream.clock, reader, read_at))
                    report(stream, what, "overwrites what is read on", reader, segment.operation);
        segment.readers[stream.index] = time;
    }
    if (!writes) return;
    segments().erase(segments().lower_bound(begin), segments().lower_bound(end));
    segments()[begin] = Segment{end, stream.index, time, what, {}};
}

void forget(const void* address, size_t bytes) {
    auto begin = reinterpret_cast<uintptr_t>(address);
    split(begin);
    split(begin + bytes);
    segments().erase(segments().lower_bound(begin), segments().lower_bound(begin + bytes));
}

}  // namespace standin

// ------------------------------------------------------------ for numerics.py
using namespace standin;

API void standin_set_place(void (*function)(char*, int)) { find_place = function; }

// Begin an operation of the program: its inputs are ready when this returns.
API void standin_begin(cudaStream_t handle) {
    Guard lock;
    Stream& stream = stream_of(handle);
    finish(lock, stream.pending);
    issue(stream);
}

API int standin_captures(cudaStream_t handle) { Guard lock; return stream_of(handle).graph != nullptr; }

API void standin_access(cudaStream_t handle, const void* address, size_t bytes, int writes,
                        const char* what) {
    static auto* names = new std::set<std::string>;  // `what` lives only during the call
    Guard lock;
    access(stream_of(handle), address, bytes, writes, names->insert(what).first->c_str());
}
