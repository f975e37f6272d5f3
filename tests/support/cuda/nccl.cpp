// NCCL: collectives whose peers exchange files in a folder in memory, as processes of one machine.
//
// Each communicator has a thread that does its operations one after the other, each when the work before it
// on its stream has ended. An operation waits for its peers for ever, or until its communicator is aborted.
// Each message names the collective, so that ranks which call different ones are recorded.
#include "order.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>

using namespace standin;
using Bytes = std::vector<char>;

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum Reduction { SUM, PRODUCT, MAX, MIN, AVERAGE };

struct UniqueId {
    char text[128];
};

// What a message says of its collective; the same on all ranks.
struct Header {
    char name[24];
    size_t bytes;
    int type, reduction;
};

struct Communicator;
struct Operation {
    std::shared_ptr<Work> work;
    Pending before;
    std::string name;
    std::function<bool(long)> run;  // gets the operation's number; returns whether it was done
};

struct Communicator {
    std::string folder;
    int rank = 0, size = 0, device = 0;
    std::vector<int> pids;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS};
    std::deque<Operation> queue;
    std::mutex mutex;
    std::condition_variable filled;
};

static std::string& last_error = *new std::string;

static void fail(Communicator* communicator, Result error, const std::string& reason) {
    if (communicator->error == SUCCESS) last_error = reason;
    communicator->error = error;
}

// ------------------------------------------------------------ messages
static void write_whole(const std::string& path, const void* first, size_t first_size, const void* second,
                        size_t second_size) {
    std::string unfinished = path + ".unfinished";
    int file = open(unfinished.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    bool ok = write(file, first, first_size) == (ssize_t)first_size;
    ok = ok && write(file, second, second_size) == (ssize_t)second_size;
    close(file);
    if (!ok) record("MISMATCH", "no room for messages of NCCL");
    rename(unfinished.c_str(), path.c_str());
}

static bool has_exited(int pid) {
    Bytes line(512);
    int file = open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY);
    if (file < 0) return true;
    ssize_t count = read(file, line.data(), line.size() - 1);
    close(file);
    const char* name_end = count > 0 ? strrchr(line.data(), ')') : nullptr;
    return !name_end || name_end[2] == 'Z';
}

// Wait until a file is there, and read it. Returns false if the communicator is aborted.
static bool read_when_there(Communicator* communicator, const std::string& path, Bytes& content) {
    static bool notices = atoi(setting("STANDIN_NCCL_NOTICES", "0"));  // as between nodes, not within one
    int file;
    for (int tries = 0; (file = open(path.c_str(), O_RDONLY)) < 0; tries++) {
        if (communicator->aborted) return false;
        usleep(tries < 200 ? 100 : 1000);
        if (!notices || tries < 500 || tries % 200) continue;
        for (int pid : communicator->pids)
            if (has_exited(pid)) fail(communicator, REMOTE_ERROR, "Connection closed by remote peer");
    }
    struct stat status;
    fstat(file, &status);
    content.resize(status.st_size);
    bool ok = read(file, content.data(), content.size()) == (ssize_t)content.size();
    close(file);
    return ok;
}

static std::string message_path(Communicator* c, long number, int from, int to, int part) {
    std::string path = c->folder;
    for (long word : {number, (long)from, (long)to, (long)part}) path += "." + std::to_string(word);
    return path;
}

static void send(Communicator* c, long number, int to, const Header& header, const void* data, int part = 0) {
    std::string path = message_path(c, number, c->rank, to, part);
    write_whole(path, &header, sizeof header, data, header.bytes);
}

// Receive a message into `data`. Returns false if the communicator is aborted, or the peer's differs.
static bool receive(Communicator* c, long number, int from, const Header& header, void* data, int part = 0) {
    std::string path = message_path(c, number, from, c->rank, part);
    Bytes content;
    if (!read_when_there(c, path, content)) return false;
    unlink(path.c_str());
    Header other;
    memcpy(&other, content.data(), sizeof other);
    if (memcmp(&other, &header, sizeof header)) {
        char text[200];
        snprintf(text, sizeof text, "collective %ld: rank %d has %s of %zu bytes, rank %d %s of %zu", number,
                 c->rank, header.name, header.bytes, from, other.name, other.bytes);
        record("MISMATCH", text);
        fail(c, INVALID_USAGE, "ranks have called different collectives");
        return false;
    }
    memcpy(data, content.data() + sizeof other, header.bytes);
    return true;
}

// ------------------------------------------------------------ communicators
static void serve(Communicator* communicator) {
    for (long number = 0;; number++) {
        Operation operation;
        {
            std::unique_lock<std::mutex> lock(communicator->mutex);
            communicator->filled.wait(lock, [&] { return !communicator->queue.empty(); });
            operation = communicator->queue.front();
            communicator->queue.pop_front();
        }
        {
            Guard lock;
            finish(lock, operation.before);
        }
        bool done = !communicator->aborted && operation.run(number);
        if (done) record("COLLECTIVE", operation.name);
        // A collective that ranks call differently never ends, until it is aborted.
        while (!done && !communicator->aborted) usleep(1000);
        Guard lock;
        operation.work->done = true;
        changed.notify_all();
    }
}

API int ncclGetVersion(int* version) { *version = 23007; return SUCCESS; }

API const char* ncclGetErrorString(int result) {
    switch (result) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case REMOTE_ERROR: return "remote process exited or there was a network error";
        default: return "an error of the NCCL stand-in";
    }
}

API const char* ncclGetLastError(Communicator*) { return last_error.c_str(); }

API int ncclGetUniqueId(UniqueId* id) {
    memset(id, 0, sizeof *id);
    std::random_device random;
    snprintf(id->text, sizeof id->text, "%08x%08x", random(), random());
    return SUCCESS;
}

API int ncclCommInitRankConfig(Communicator** result, int size, UniqueId id, int rank, void*) {
    *result = nullptr;
    const char* failure = setting("STANDIN_NCCL_FAIL", "");
    if (*failure) {
        last_error = failure;
        return SYSTEM_ERROR;
    }
    auto* communicator = new Communicator;
    communicator->folder = std::string(setting("STANDIN_DIR", "/dev/shm")) + "/nccl-" + id.text;
    communicator->rank = rank;
    communicator->size = size;
    communicator->device = current_device;
    struct Member {
        int gpu, pid;
    } own = {physical_device(current_device), getpid()};
    write_whole(communicator->folder + ".member." + std::to_string(rank), &own, sizeof own, nullptr, 0);
    for (int other = 0; other < size; other++) {
        Bytes content;
        read_when_there(communicator, communicator->folder + ".member." + std::to_string(other), content);
        Member member;
        memcpy(&member, content.data(), sizeof member);
        communicator->pids.push_back(member.pid);
        if (other == rank || member.gpu != own.gpu) continue;
        last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                     std::to_string(other) + " both on CUDA device " + std::to_string(1000 * (own.gpu + 1));
        return INVALID_USAGE;
    }
    std::thread(serve, communicator).detach();
    *result = communicator;
    return SUCCESS;
}

API int ncclCommAbort(Communicator* communicator) { communicator->aborted = true; return SUCCESS; }

API int ncclCommGetAsyncError(Communicator* communicator, int* error) {
    *error = communicator->error;
    return SUCCESS;
}

API int ncclCommCount(Communicator* communicator, int* count) { *count = communicator->size; return SUCCESS; }
API int ncclCommDestroy(Communicator*) { return SUCCESS; }
API int ncclCommFinalize(Communicator*) { return SUCCESS; }

// ------------------------------------------------------------ collectives
static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

static Header describe(const char* name, size_t bytes, int type = 0, int reduction = 0) {
    Header header;
    memset(&header, 0, sizeof header);
    snprintf(header.name, sizeof header.name, "%s", name);
    header.bytes = bytes;
    header.type = type;
    header.reduction = reduction;
    return header;
}

struct Range {
    const void* begin;
    size_t bytes;
};

static int enqueue(Communicator* communicator, cudaStream_t handle, const Header& header,
                   std::vector<Range> reads, std::vector<Range> writes, std::function<bool(long)> run) {
    std::string name = std::string(header.name) + " " + std::to_string(header.bytes);
    Operation operation{std::make_shared<Work>(), {}, name, run};
    {
        Guard lock;
        Stream& stream = stream_of(handle);
        if (stream.graph) record("FORBIDDEN", "a collective while a stream captures is not supported here");
        issue(stream);
        for (auto& range : reads) access(stream, range.begin, range.bytes, false, "a collective");
        for (auto& range : writes) access(stream, range.begin, range.bytes, true, "a collective");
        operation.before = stream.pending;
        stream.pending = {operation.work};
    }
    std::unique_lock<std::mutex> lock(communicator->mutex);
    communicator->queue.push_back(operation);
    communicator->filled.notify_all();
    return SUCCESS;
}

template <class T>
static void combine_as(char* into, const char* from, size_t count, int reduction) {
    T* a = reinterpret_cast<T*>(into);
    const T* b = reinterpret_cast<const T*>(from);
    for (size_t i = 0; i < count; i++) switch (reduction) {
            case PRODUCT: a[i] *= b[i]; break;
            case MAX: a[i] = std::max(a[i], b[i]); break;
            case MIN: a[i] = std::min(a[i], b[i]); break;
            default: a[i] += b[i];
        }
}

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value) {  // rounds to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static void combine(char* into, const char* from, size_t count, int type, int reduction) {
    switch (type) {
        case INT8: return combine_as<int8_t>(into, from, count, reduction);
        case UINT8: return combine_as<uint8_t>(into, from, count, reduction);
        case INT32: return combine_as<int32_t>(into, from, count, reduction);
        case INT64: return combine_as<int64_t>(into, from, count, reduction);
        case FLOAT32: return combine_as<float>(into, from, count, reduction);
        case FLOAT64: return combine_as<double>(into, from, count, reduction);
        case BFLOAT16:
            for (size_t i = 0; i < count; i++) {
                auto& a = reinterpret_cast<uint16_t*>(into)[i];
                a = to_bfloat16(from_bfloat16(a) + from_bfloat16(reinterpret_cast<const uint16_t*>(from)[i]));
            }
            return;
        default: record("MISMATCH", "the NCCL stand-in cannot reduce type " + std::to_string(type));
    }
}

static void divide(char* values, size_t count, int type, int size) {
    for (size_t i = 0; i < count; i++)
        if (type == FLOAT32) reinterpret_cast<float*>(values)[i] /= size;
        else if (type == FLOAT64) reinterpret_cast<double*>(values)[i] /= size;
}

// Send each rank its part of `source` (a `stride` of 0: all get the same), and combine what all ranks send.
static bool reduce_parts(Communicator* c, long number, const Header& header, const char* source,
                         size_t stride, char* destination) {
    for (int rank = 0; rank < c->size; rank++) send(c, number, rank, header, source + rank * stride);
    size_t count = header.bytes / size_of(header.type);
    Bytes total(header.bytes), received(header.bytes);
    for (int rank = 0; rank < c->size; rank++) {  // the ranks' order: the same sum everywhere
        if (!receive(c, number, rank, header, rank ? received.data() : total.data())) return false;
        if (rank) combine(total.data(), received.data(), count, header.type, header.reduction);
    }
    if (header.reduction == AVERAGE) divide(total.data(), count, header.type, c->size);
    memcpy(destination, total.data(), header.bytes);
    return true;
}

API int ncclAllReduce(const void* source, void* destination, size_t count, int type, int reduction,
                      Communicator* c, cudaStream_t stream) {
    Header header = describe("all_reduce", count * size_of(type), type, reduction);
    std::vector<Range> reads = {{source, header.bytes}}, writes = {{destination, header.bytes}};
    return enqueue(c, stream, header, reads, writes, [=](long number) {
        return reduce_parts(c, number, header, (const char*)source, 0, (char*)destination);
    });
}

API int ncclReduceScatter(const void* source, void* destination, size_t count, int type, int reduction,
                          Communicator* c, cudaStream_t stream) {
    Header header = describe("reduce_scatter", count * size_of(type), type, reduction);
    std::vector<Range> reads = {{source, header.bytes * c->size}};
    return enqueue(c, stream, header, reads, {{destination, header.bytes}}, [=](long number) {
        return reduce_parts(c, number, header, (const char*)source, header.bytes, (char*)destination);
    });
}

// Send each rank its part of `source` (a `stride` of 0: all get the same), and gather what all ranks send.
static bool exchange_parts(Communicator* c, long number, const Header& header, const char* source,
                           size_t stride, char* destination) {
    for (int rank = 0; rank < c->size; rank++) send(c, number, rank, header, source + rank * stride);
    for (int rank = 0; rank < c->size; rank++)
        if (!receive(c, number, rank, header, destination + rank * header.bytes)) return false;
    return true;
}

API int ncclAllGather(const void* source, void* destination, size_t count, int type, Communicator* c,
                      cudaStream_t stream) {
    Header header = describe("all_gather", count * size_of(type));
    std::vector<Range> writes = {{destination, header.bytes * c->size}};
    return enqueue(c, stream, header, {{source, header.bytes}}, writes, [=](long number) {
        return exchange_parts(c, number, header, (const char*)source, 0, (char*)destination);
    });
}

API int ncclAlltoAll(const void* source, void* destination, size_t count, int type, Communicator* c,
                     cudaStream_t stream) {
    Header header = describe("all_to_all", count * size_of(type));
    size_t all = header.bytes * c->size;
    std::vector<Range> reads = {{source, all}}, writes = {{destination, all}};
    return enqueue(c, stream, header, reads, writes, [=](long number) {
        return exchange_parts(c, number, header, (const char*)source, header.bytes, (char*)destination);
    });
}

API int ncclBroadcast(const void* source, void* destination, size_t count, int type, int root,
                      Communicator* c, cudaStream_t stream) {
    Header header = describe("broadcast", count * size_of(type));
    std::vector<Range> reads, writes = {{destination, header.bytes}};
    if (c->rank == root) reads.push_back({source, header.bytes});
    return enqueue(c, stream, header, reads, writes, [=](long number) {
        if (c->rank == root)
            for (int rank = 0; rank < c->size; rank++) send(c, number, rank, header, source);
        return receive(c, number, root, header, destination);
    });
}

API int ncclBcast(void* buffer, size_t count, int type, int root, Communicator* c, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}

// Messages between pairs of ranks: those of a group are one operation.
struct Message {
    bool is_sent;
    int peer;
    char* data;
    Header header;
};

static thread_local int group_depth = 0;
static thread_local std::vector<Message> group;
static thread_local Communicator* group_communicator;
static thread_local cudaStream_t group_stream;

static bool exchange_messages(Communicator* c, long number, const std::vector<Message>& messages) {
    std::map<int, int> sent, received;  // how many, by peer
    for (auto& message : messages)
        if (message.is_sent)
            send(c, number, message.peer, message.header, message.data, sent[message.peer]++);
    for (auto& message : messages)
        if (!message.is_sent &&
            !receive(c, number, message.peer, message.header, message.data, received[message.peer]++))
            return false;
    return true;
}

API int ncclGroupStart() { group_depth++; return SUCCESS; }

API int ncclGroupEnd() {
    if (--group_depth || group.empty()) return SUCCESS;
    std::vector<Message> messages;
    messages.swap(group);
    std::vector<Range> reads, writes;
    size_t bytes = 0;
    for (auto& message : messages) {
        (message.is_sent ? reads : writes).push_back({message.data, message.header.bytes});
        bytes += message.header.bytes;
    }
    Communicator* c = group_communicator;
    return enqueue(c, group_stream, describe("messages", bytes), reads, writes,
                   [=](long number) { return exchange_messages(c, number, messages); });
}

static int add_message(bool is_sent, void* data, size_t bytes, int peer, Communicator* c,
                       cudaStream_t stream) {
    ncclGroupStart();
    group.push_back({is_sent, peer, (char*)data, describe("message", bytes)});
    group_communicator = c;
    group_stream = stream;
    return ncclGroupEnd();
}

API int ncclSend(const void* data, size_t count, int type, int peer, Communicator* c, cudaStream_t stream) {
    return add_message(true, (void*)data, count * size_of(type), peer, c, stream);
}

API int ncclRecv(void* data, size_t count, int type, int peer, Communicator* c, cudaStream_t stream) {
    return add_message(false, data, count * size_of(type), peer, c, stream);
}
