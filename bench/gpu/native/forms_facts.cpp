// What the driver lets a program do while a stream is held or a kernel runs. One fact a
// process, since a wrong expectation could hang it: nothing is held longer than HELD_MS.
// Prints one JSON object.
//
//   forms_facts wait-streams|wait-cost|green|while-busy|while-held|raise ORIGINAL PATCHED
#include "forms.h"

#include <atomic>
#include <cstring>
#include <thread>

static const int HELD_MS = 300;
// Two words far apart: what streams wait for, what they write.
static const int WORD = 0, SEEN = 64;

static CUcontext context;
static CUdevice device;
static CUfunction spin_kernel, add_kernel;
static CUdeviceptr memory;
static HostWords *host;

static void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Lets go of the word after HELD_MS whatever happens; no driver call in it.
struct Watchdog {
    std::thread thread;
    std::atomic<bool> stop{false};
    double begin = now_us();
    Watchdog() {
        thread = std::thread([this] {
            while (!stop && now_us() - begin < HELD_MS * 1e3) sleep_ms(1);
            host->words[WORD] = 1;
        });
    }
    ~Watchdog() {
        stop = true;
        thread.join();
    }
};

// Blocks that spin for `us`.
static CUresult spin(CUstream stream, unsigned blocks, unsigned us) {
    CUdeviceptr none = 0;
    void *arguments[] = {&none, &none, &memory, &us, &none};
    return cuLaunchKernel(spin_kernel, blocks, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr);
}

static CUresult add(CUstream stream) {
    CUdeviceptr none = 0, from = memory, to = memory + 65536;
    unsigned n = 1024;
    void *arguments[] = {&from, &from, &to, &n, &none};
    return cuLaunchKernel(add_kernel, 4, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr);
}

static double until_done(CUstream stream, double limit_us) {
    double begin = now_us();
    while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) {
        if (now_us() - begin > limit_us) return -1;
    }
    return now_us() - begin;
}

// Does a wait hold each kind of stream, and does it go on when the CPU stores the word?
static void wait_streams(Json &json) {
    CUstream blocking, apart;
    CK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    CK(cuStreamCreate(&apart, CU_STREAM_NON_BLOCKING));
    struct {
        const char *name;
        CUstream stream;
    } kinds[] = {{"null", nullptr}, {"legacy_handle", CU_STREAM_LEGACY}, {"per_thread", CU_STREAM_PER_THREAD},
                 {"blocking", blocking}, {"non_blocking", apart}};
    for (auto &kind : kinds) {
        host->words[WORD] = 0;
        Json row;
        Watchdog watchdog;
        row.result("wait", cuStreamWaitValue32(kind.stream, host->device, 1, CU_STREAM_WAIT_VALUE_GEQ));
        double begin = now_us();
        row.result("launch_behind_it", spin(kind.stream, 1, 1));
        row.number("launch_us", now_us() - begin, "%.1f");
        sleep_ms(20);
        row.flag("held", cuStreamQuery(kind.stream) == CUDA_ERROR_NOT_READY);
        host->words[WORD] = 1;
        row.number("done_after_release_us", until_done(kind.stream, 1e6), "%.1f");
        json.raw(kind.name, row.done());
    }
}

// A satisfied wait, and a write, in a stream of short kernels.
static void wait_cost(Json &json) {
    CUstream stream;
    CK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    host->words[WORD] = 1;
    // Beyond what `spin` writes.
    const CUdeviceptr word = memory + (512 << 10);
    CK(cuMemsetD32(word, 1, 1));
    const int kernels = 1000;
    auto series = [&](const char *name, auto each) {
        double best = 1e18, best_host = 1e18;
        for (int repeat = 0; repeat < 5; ++repeat) {
            CK(cuStreamSynchronize(stream));
            double begin = now_us();
            for (int i = 0; i < kernels; ++i) {
                CK(each());
                CK(spin(stream, 132, 4));
            }
            double queued = now_us();
            CK(cuStreamSynchronize(stream));
            best = std::min(best, (now_us() - begin) / kernels);
            best_host = std::min(best_host, (queued - begin) / kernels);
        }
        Json row;
        row.number("us_a_kernel", best);
        row.number("host_us_a_kernel", best_host);
        json.raw(name, row.done());
    };
    series("nothing", [&] { return CUDA_SUCCESS; });
    series("wait_device", [&] { return cuStreamWaitValue32(stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ); });
    series("wait_host", [&] { return cuStreamWaitValue32(stream, host->device, 1, CU_STREAM_WAIT_VALUE_GEQ); });
    series("write_host", [&] { return cuStreamWriteValue32(stream, host->device + SEEN * 4, 1, 0); });
}

// A kernel of the primary context's module on a green context's stream, no context switched.
static void green(Json &json) {
    CUdevResource whole = {}, part = {}, rest = {};
    CK(cuDeviceGetDevResource(device, &whole, CU_DEV_RESOURCE_TYPE_SM));
    unsigned groups = 1;
    CK(cuDevSmResourceSplitByCount(&part, &groups, &whole, &rest, 0, 64));
    CUdevResourceDesc description;
    CK(cuDevResourceGenerateDesc(&description, &part, 1));
    CUgreenCtx narrow;
    CK(cuGreenCtxCreate(&narrow, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
    CUstream stream;
    CK(cuGreenCtxStreamCreate(&stream, narrow, CU_STREAM_NON_BLOCKING, 0));
    json.integer("sms", part.sm.smCount);
    CUcontext current = nullptr;
    CK(cuCtxGetCurrent(&current));
    json.flag("primary_is_current", current == context);
    std::vector<float> ones(1024, 1.5f), sums(1024);
    CK(cuMemcpyHtoD(memory, ones.data(), 4096));
    CK(cuMemsetD32(memory + 65536, 0, 1024));
    json.result("launch", add(stream));
    json.result("synchronise", cuStreamSynchronize(stream));
    CK(cuMemcpyDtoH(sums.data(), memory + 65536, 4096));
    json.flag("right_sum", std::all_of(sums.begin(), sums.end(), [](float x) { return x == 3.f; }));
    // One block an SM for 2 ms, as many as the device has: two rounds if the width is kept.
    auto time = [&](CUstream on) {
        double begin = now_us();
        for (int i = 0; i < 1; ++i) CK(spin(on, whole.sm.smCount * 16, 2000));
        CK(cuStreamSynchronize(on));
        return now_us() - begin;
    };
    CUstream wide;
    CK(cuStreamCreate(&wide, CU_STREAM_NON_BLOCKING));
    time(wide);
    json.number("wide_us", time(wide), "%.0f");
    json.number("narrow_us", time(stream), "%.0f");
    json.result("wait_value", cuStreamWaitValue32(stream, host->device, 0, CU_STREAM_WAIT_VALUE_GEQ));
    json.result("write_value", cuStreamWriteValue32(stream, host->device + SEEN * 4, 7, 0));
    json.result("synchronise_after", cuStreamSynchronize(stream));
    json.flag("written", host->words[SEEN] == 7);
}

// Which calls wait for a kernel that runs for 200 ms on a few SMs?
static void while_busy(Json &json, const std::vector<char> &patched) {
    CUstream busy, other;
    CK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CK(add(other));
    CK(spin(busy, 1, 10));
    CK(cuCtxSynchronize());
    auto timed = [&](const char *name, auto call) {
        CK(cuStreamSynchronize(busy));
        CK(spin(busy, 8, 200000));
        sleep_ms(2);
        double begin = now_us();
        CUresult result = call();
        double us = now_us() - begin;
        Json row;
        row.result("result", result);
        row.number("us", us, "%.1f");
        row.flag("waited", cuStreamQuery(busy) == CUDA_SUCCESS);
        json.raw(name, row.done());
    };
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CUdeviceptr block = 0;
    void *pinned = nullptr;
    CUstream fresh = nullptr;
    // A module without variables, compiled by the driver.
    const char *small = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";
    CUmodule small_module = nullptr;
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    timed("cuModuleLoadData_small_ptx", [&] { return cuModuleLoadData(&small_module, small); });
    timed("cuLibraryLoadData_patched",
          [&] { return cuLibraryLoadData(&library, patched.data(), nullptr, nullptr, 0, nullptr, nullptr, 0); });
    timed("cuLibraryGetKernel", [&] { return cuLibraryGetKernel(&kernel, library, "vecadd"); });
    timed("cuKernelGetFunction", [&] { return cuKernelGetFunction(&function, kernel); });
    timed("cuModuleLoadData_patched", [&] { return cuModuleLoadData(&module, patched.data()); });
    timed("cuModuleGetFunction", [&] { return cuModuleGetFunction(&function, module, "spin"); });
    timed("first_launch_elsewhere", [&] {
        // Of the new module, out of slice: the control block follows five parameters.
        struct { unsigned long long address[3]; unsigned words[8]; } control = {};
        CUdeviceptr none = 0;
        unsigned us = 1;
        void *arguments[] = {&none, &none, &memory, &us, &none, &control};
        CUresult result = cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, other, arguments, nullptr);
        until_done(other, 1e6);
        return result;
    });
    timed("cuMemAlloc_4MiB", [&] { return cuMemAlloc(&block, 4 << 20); });
    timed("cuMemsetD32Async", [&] { return cuMemsetD32Async(block, 0, 1 << 20, other); });
    timed("cuMemFree", [&] { return cuMemFree(block); });
    timed("cuMemHostAlloc", [&] { return cuMemHostAlloc(&pinned, 4096, CU_MEMHOSTALLOC_DEVICEMAP); });
    timed("cuStreamCreate", [&] { return cuStreamCreateWithPriority(&fresh, CU_STREAM_NON_BLOCKING, -1); });
    timed("cuModuleUnload", [&] { return cuModuleUnload(module); });
}

// A stream is held; a second thread sits in a call that waits for it; can a third go on?
static void while_held(Json &json, const std::vector<char> &patched) {
    CUevent event;
    CK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CUstream held, other, third;
    CK(cuStreamCreate(&held, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&third, CU_STREAM_NON_BLOCKING));
    CK(add(other));
    CK(add(held));
    CK(cuCtxSynchronize());
    struct {
        const char *call;
        bool writes_first;
    } cases[] = {{"cuCtxSynchronize", false}, {"cuMemFree", false},        {"cuMemFree", true},
                 {"cuMemAlloc", false},       {"cuMemcpyDtoH", false},     {"cuStreamSynchronize", false},
                 {"cuModuleLoadData", false}, {"cuModuleLoadData", true},  {"cuLibraryLoadData", false},
                 {"cuMemFreeAsync", false},   {"cuEventSynchronize", false}};
    for (auto [call, writes_first] : cases) {
        CUdeviceptr block = 0;
        CUdeviceptr from_pool = 0;
        CK(cuMemAlloc(&block, 4 << 20));
        CK(cuMemAllocAsync(&from_pool, 4 << 20, other));
        CK(cuCtxSynchronize());
        host->words[WORD] = 0;
        host->words[SEEN] = 0;
        Json row;
        std::atomic<double> returned{0};
        double begin = now_us();
        Watchdog watchdog;
        CK(cuStreamWaitValue32(held, host->device, 1, CU_STREAM_WAIT_VALUE_GEQ));
        CK(add(held));
        CK(cuEventRecord(event, held));
        std::thread sitter([&] {
            cuCtxSetCurrent(context);
            CUdeviceptr more = 0;
            CUmodule module;
            CUlibrary library;
            CUkernel kernel;
            CUfunction function;
            float word;
            std::string name = call;
            if (name == "cuCtxSynchronize") cuCtxSynchronize();
            if (name == "cuMemFree") cuMemFree(block);
            if (name == "cuMemAlloc") cuMemAlloc(&more, 64 << 20);
            if (name == "cuMemcpyDtoH") cuMemcpyDtoH(&word, memory, 4);
            if (name == "cuStreamSynchronize") cuStreamSynchronize(held);
            if (name == "cuModuleLoadData") cuModuleLoadData(&module, patched.data());
            if (name == "cuLibraryLoadData") {
                // Until its function is there.
                cuLibraryLoadData(&library, patched.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
                cuLibraryGetKernel(&kernel, library, "vecadd");
                cuKernelGetFunction(&function, kernel);
            }
            if (name == "cuMemFreeAsync") cuMemFreeAsync(from_pool, other);
            if (name == "cuEventSynchronize") cuEventSynchronize(event);
            returned = now_us() - begin;
            // What was made is left: to free it would wait too.
        });
        std::string steps;
        std::thread worker([&] {
            cuCtxSetCurrent(context);
            sleep_ms(20);
            auto timed = [&](const char *name, CUresult result, double from) {
                Json step;
                step.string("call", name);
                step.result("result", result);
                step.number("us", now_us() - from, "%.1f");
                steps += (steps.empty() ? "" : ", ") + step.done();
            };
            auto launches = [&] {
                double from = now_us();
                timed("launch", add(other), from);
                from = now_us();
                double done = until_done(other, 1e6);
                timed("its end", done < 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS, from);
            };
            auto writes = [&] {
                double from = now_us();
                timed("cuStreamWriteValue32", cuStreamWriteValue32(third, host->device + SEEN * 4, 1, 0), from);
                from = now_us();
                while (host->words[SEEN] != 1 && now_us() - from < 1e6) {
                }
                timed("seen", CUDA_SUCCESS, from);
                from = now_us();
                timed("cuStreamQuery", cuStreamQuery(held), from);
            };
            if (writes_first) writes();
            launches();
            if (!writes_first) writes();
        });
        worker.join();
        double worker_ms = (now_us() - begin) / 1e3;
        sitter.join();
        row.number("third_thread_done_ms", worker_ms);
        row.number("second_thread_returned_ms", returned / 1e3);
        row.raw("steps", "[" + steps + "]");
        json.raw(std::string(call) + (writes_first ? "_writes_first" : ""), row.done());
        CK(cuCtxSynchronize());
    }
}

// Raising a flag of several words on an otherwise idle device: the host's time, and until it is there.
// By a batch of writes, and by one copy of the whole flag from host memory.
static void raise(Json &json) {
    CUstream stream;
    CK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    static CUstreamBatchMemOpParams operations[129];
    void *image = nullptr;
    CK(cuMemHostAlloc(&image, 128 * 128, CU_MEMHOSTALLOC_PORTABLE));
    for (unsigned count : {1u, 4u, 16u, 128u}) {
        std::vector<double> queued, seen;
        for (unsigned i = 0; i < 300; ++i) {
            for (unsigned k = 0; k <= count; ++k) {
                operations[k] = {};
                operations[k].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                operations[k].writeValue.address = k == count ? host->device + SEEN * 4 : memory + k * 128;
                operations[k].writeValue.value = i + 1;
            }
            double begin = now_us();
            CK(cuStreamBatchMemOp(stream, count + 1, operations, 0));
            queued.push_back(now_us() - begin);
            while (host->words[SEEN] != i + 1) {
            }
            seen.push_back(now_us() - begin);
        }
        Json row;
        row.raw("host_p50_us", percentile(queued, 0.5));
        row.raw("host_p99_us", percentile(queued, 0.99));
        row.raw("all_seen_p50_us", percentile(seen, 0.5));
        row.raw("all_seen_p99_us", percentile(seen, 0.99));
        json.raw("words_" + std::to_string(count), row.done());
        seen.clear();
        for (unsigned i = 0; i < 300; ++i) {
            double begin = now_us();
            CK(cuMemcpyHtoDAsync(memory, image, count * 128, stream));
            CK(cuStreamWriteValue32(stream, host->device + SEEN * 4, i + 1000, 0));
            while (host->words[SEEN] != i + 1000) {
            }
            seen.push_back(now_us() - begin);
        }
        Json copy;
        copy.raw("all_seen_p50_us", percentile(seen, 0.5));
        copy.raw("all_seen_p99_us", percentile(seen, 0.99));
        json.raw("copy_of_" + std::to_string(count), copy.done());
    }
}

int main(int count, char **words) {
    if (count < 4) {
        std::fprintf(stderr, "usage: forms_facts FACT ORIGINAL PATCHED\n");
        return 2;
    }
    CK(cuInit(0));
    CK(cuDeviceGet(&device, 0));
    CK(cuDevicePrimaryCtxRetain(&context, device));
    CK(cuCtxSetCurrent(context));
    host = new HostWords();
    CK(cuMemAlloc(&memory, 1 << 20));
    std::vector<char> original = read_file(words[2]), patched = read_file(words[3]);
    CUmodule module;
    CK(cuModuleLoadData(&module, original.data()));
    CK(cuModuleGetFunction(&spin_kernel, module, "spin"));
    CK(cuModuleGetFunction(&add_kernel, module, "vecadd"));
    std::string fact = words[1];
    Json json;
    if (fact == "wait-streams") wait_streams(json);
    if (fact == "wait-cost") wait_cost(json);
    if (fact == "green") green(json);
    if (fact == "while-busy") while_busy(json, patched);
    if (fact == "while-held") while_held(json, patched);
    if (fact == "raise") raise(json);
    std::printf("%s\n", json.done().c_str());
    std::fflush(stdout);
    std::_Exit(0);
}
