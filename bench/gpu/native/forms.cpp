// One kernel, original and transformed: are results bit-equal, does every block run once, what
// does it cost, how soon does it yield? Prints one JSON object.
//
//   forms KERNEL ORIGINAL NAME=IMAGE:PARAMETERS...
//
// An IMAGE is what `tally-rewrite` wrote, PARAMETERS how many the original has. A NAME that
// contains `sub-grid` is of that form; others have the prelude.
#include "forms.h"

#include <cmath>
#include <cstring>
#include <functional>

struct Control {
    unsigned long long table, flag, notice;
    unsigned lo, hi, epoch2, base2, dims[3], flag_mask;
};
static_assert(sizeof(Control) == 56, "as the preludes read it");

struct Spec {
    const char *name;
    unsigned grid[3], block[2], shared_bytes, cluster[2];
    bool cluster_at_launch, blocks_wait;
    unsigned n;
    size_t results;
};
static const Spec SPECS[] = {
    {"vecadd", {65536, 1, 1}, {256, 1}, 0, {1, 1}, false, false, 16777216, 16777216},
    {"matmul", {64, 64, 1}, {32, 32}, 0, {1, 1}, false, false, 2048, 4194304},
    {"reduce", {4096, 1, 1}, {200, 1}, 800, {1, 1}, false, false, 67108000, 4096},
    {"recursion", {64, 32, 8}, {128, 1}, 0, {1, 1}, false, false, 2097000, 2097152},
    {"cluster_fixed", {16384, 1, 1}, {256, 1}, 0, {4, 1}, false, false, 4194304, 4194304},
    {"cluster_launched", {128, 128, 1}, {256, 1}, 0, {2, 4}, true, false, 4194304, 4194304},
    {"bulk_copy", {8192, 1, 1}, {128, 1}, 0, {1, 1}, false, false, 16777216, 16777216},
    {"reconfigure", {4096, 1, 1}, {384, 1}, 0, {1, 1}, false, false, 4194304, 1048576},
    {"globals", {20000, 1, 1}, {64, 1}, 0, {1, 1}, false, false, 0, 4096},
    {"spin", {12672, 1, 1}, {128, 1}, 0, {1, 1}, false, false, 50, 12672},
    {"lookback", {12000, 1, 1}, {32, 1}, 0, {1, 1}, false, true, 0, 12000},
};
static const unsigned MASKS[] = {0, 3, 15, 127};
static const unsigned STRIDE = 128, SLICES = 8, PIECES_MAX = 64;
static const double STUCK_US = 60e3, LIMIT_US = 3e6, SLICE_BOUND_US = 31.6;
// The shim's, `core/shim/src/forms/form.rs`.
static const unsigned WHOLE_GRID_MAX = 8 * 1024;
static const double EXIT_US = 2e-3, US_PER_SLICE = 32;
// A whole series of preemptions of one kind, and of trials at most.
static const double SERIES_US = 0.4e6;
static const int TRIALS_MAX = 60;
// A stream that has not gone on for so long waits at the gate.
static const double SETTLED_US = 50;

static Spec spec;
static bool no_parameters;
static unsigned blocks, warps, epoch;
static CUstream stream, urgent, rescue;
static CUdeviceptr a, b, out, ran, table, flags;
static HostWords *host;
// Images of the whole flag in host memory, in turn, for raising it by one copy.
static char *flag_images[4];

struct Variant {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CUdeviceptr global = 0;
    unsigned parameters = 0;
    bool transformed = false, sub_grid = false;
};

static CUresult load(Variant &variant, const std::vector<char> &image) {
    CUresult result = cuModuleLoadData(&variant.module, image.data());
    if (result == CUDA_SUCCESS) result = cuModuleGetFunction(&variant.function, variant.module, spec.name);
    size_t bytes;
    if (result == CUDA_SUCCESS && no_parameters) result = cuModuleGetGlobal(&variant.global, &bytes, variant.module, "tally");
    return result;
}

static void launch(const Variant &variant, const Control *control, CUdeviceptr counts, CUstream on, unsigned wide = 0) {
    void *own[6] = {&a, &b, &out, &spec.n, &counts, nullptr};
    void **arguments = no_parameters ? own + 5 : own;
    if (variant.transformed) arguments[variant.parameters] = const_cast<Control *>(control);
    CUlaunchConfig config = {};
    config.gridDimX = wide != 0 ? wide : spec.grid[0];
    config.gridDimY = wide != 0 ? 1 : spec.grid[1];
    config.gridDimZ = wide != 0 ? 1 : spec.grid[2];
    config.blockDimX = spec.block[0];
    config.blockDimY = spec.block[1];
    config.blockDimZ = 1;
    config.sharedMemBytes = spec.shared_bytes;
    config.hStream = on;
    CUlaunchAttribute cluster = {};
    if (spec.cluster_at_launch) {
        cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        cluster.value.clusterDim.x = spec.cluster[0];
        cluster.value.clusterDim.y = spec.cluster[1];
        cluster.value.clusterDim.z = 1;
        config.attrs = &cluster;
        config.numAttrs = 1;
    }
    CK(cuLaunchKernelEx(&config, variant.function, arguments, nullptr));
}

// A new instance of the kernel: nothing of it is claimed.
static Control preemptible(unsigned mask) {
    Control control = {};
    control.table = table;
    control.flag = flags;
    control.notice = host->device;
    control.hi = ~0u;
    control.epoch2 = control.base2 = 2 * ++epoch;
    control.dims[0] = spec.cluster[0] - 1;
    control.dims[1] = spec.cluster[1] - 1;
    control.flag_mask = mask;
    return control;
}

static Control slice(unsigned index, unsigned of) {
    Control control = {};
    // Whole clusters: the id that counts is their first block's.
    control.lo = static_cast<unsigned>(static_cast<unsigned long long>(blocks) * index / of);
    control.hi = static_cast<unsigned>(static_cast<unsigned long long>(blocks) * (index + 1) / of);
    control.dims[0] = spec.cluster[0] - 1;
    control.dims[1] = spec.cluster[1] - 1;
    return control;
}

static void clear(const Variant &variant) {
    CK(cuMemsetD32(out, 0, spec.results));
    CK(cuMemsetD32(ran, 0, blocks));
    if (variant.global != 0) CK(cuMemsetD32(variant.global, 0, spec.results));
    host->words[0] = 0;
    CK(cuCtxSynchronize());
}

static std::vector<unsigned> results(const Variant &variant) {
    std::vector<unsigned> found(spec.results);
    CK(cuMemcpyDtoH(found.data(), variant.global != 0 ? variant.global : out, spec.results * 4));
    return found;
}

static bool every_block_once() {
    if (no_parameters) return true;
    std::vector<unsigned> counts(blocks);
    CK(cuMemcpyDtoH(counts.data(), ran, blocks * 4ull));
    return std::all_of(counts.begin(), counts.end(), [](unsigned c) { return c == warps; });
}

template <typename Launch> static double median_us(Launch go, int repeats = 9) {
    CUevent begin, end;
    CK(cuEventCreate(&begin, 0));
    CK(cuEventCreate(&end, 0));
    std::vector<float> times;
    for (int i = -2; i < repeats; ++i) {
        // Results of a look-back must be gone before it runs again, but that is not to be timed.
        if (spec.blocks_wait) CK(cuMemsetD32Async(out, 0, spec.results, stream));
        CK(cuEventRecord(begin, stream));
        go();
        CK(cuEventRecord(end, stream));
        CK(cuEventSynchronize(end));
        float ms;
        CK(cuEventElapsedTime(&ms, begin, end));
        if (i >= 0) times.push_back(ms * 1000);
    }
    CK(cuEventDestroy(begin));
    CK(cuEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// One word by one write; several by a batch of writes, or by one copy of the whole flag.
static void raise_flag(unsigned mask, unsigned value, bool by_copy = false) {
    if (by_copy) {
        static unsigned turn = 0;
        char *image = flag_images[turn++ % 4];
        for (unsigned i = 0; i <= mask; ++i) *reinterpret_cast<volatile unsigned *>(image + i * STRIDE) = value;
        CK(cuMemcpyHtoDAsync(flags, image, (mask + 1) * STRIDE, urgent));
        return;
    }
    if (mask == 0) {
        CK(cuStreamWriteValue32(urgent, flags, value, 0));
        return;
    }
    static CUstreamBatchMemOpParams operations[128];
    for (unsigned i = 0; i <= mask; ++i) {
        operations[i] = {};
        operations[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        operations[i].writeValue.address = flags + i * STRIDE;
        operations[i].writeValue.value = value;
    }
    CK(cuStreamBatchMemOp(urgent, mask + 1, operations, 0));
}

static bool done_within(CUstream on, double limit_us) {
    double end = now_us() + limit_us;
    for (;;) {
        CUresult result = cuStreamQuery(on);
        if (result == CUDA_SUCCESS) return true;
        if (result != CUDA_ERROR_NOT_READY) CK(result);
        if (now_us() > end) return false;
    }
}

static void give_up(const char *what) {
    std::fprintf(stderr, "%s: %s\n", spec.name, what);
    std::fflush(stderr);
    std::_Exit(4);
}

// Stopped up to three times at different points, relaunched until it is complete.
static std::string preempted(const Variant &variant, unsigned mask, bool by_copy, const std::vector<unsigned> &expected,
                             double whole_us) {
    std::vector<double> turnaround, host_us;
    bool equal = true, once = true, complete = true;
    int trials = 0, launches = 0, rescued = 0, over_before = 0;
    double end = now_us() + SERIES_US;
    for (; trials < TRIALS_MAX && (trials < 3 || now_us() < end); ++trials) {
        clear(variant);
        Control control = preemptible(mask);
        bool done = false;
        for (int count = 0; !done && count < 64; ++count) {
            if (count > 0) control.epoch2 = 2 * ++epoch;
            launch(variant, &control, ran, stream);
            ++launches;
            if (count < 3) {
                double raise_at = now_us() + 15 + whole_us * (0.05 + 0.07 * (trials % 10));
                while (now_us() < raise_at) {
                }
                double begin = now_us();
                bool over = cuStreamQuery(stream) == CUDA_SUCCESS;
                raise_flag(mask, control.epoch2, by_copy);
                host_us.push_back(now_us() - begin);
                if (done_within(stream, spec.blocks_wait ? STUCK_US : LIMIT_US)) {
                    if (over) ++over_before;
                    else turnaround.push_back(now_us() - begin);
                } else {
                    // Blocks that run wait for blocks that were skipped: these must run beside them.
                    ++rescued;
                    Control beside = control;
                    beside.epoch2 = 2 * ++epoch;
                    launch(variant, &beside, ran, rescue);
                    if (!done_within(rescue, LIMIT_US) || !done_within(stream, LIMIT_US)) give_up("stuck beyond rescue");
                    control.epoch2 = beside.epoch2;
                    host->words[0] = 0;
                }
            } else if (!done_within(stream, LIMIT_US)) {
                give_up("a relaunch is stuck");
            }
            done = host->words[0] != control.epoch2;
        }
        CK(cuStreamSynchronize(urgent));
        complete &= done;
        equal &= results(variant) == expected;
        once &= every_block_once();
    }
    Json row;
    row.integer("flag_mask", mask);
    row.string("raised_by", by_copy ? "copy" : "writes");
    row.flag("equal", equal);
    row.flag("once", once);
    row.flag("complete", complete);
    row.raw("turnaround_p50_us", percentile(turnaround, 0.5));
    row.raw("turnaround_p99_us", percentile(turnaround, 0.99));
    row.raw("turnaround_max_us", percentile(turnaround, 1));
    row.raw("raise_host_p50_us", percentile(host_us, 0.5));
    row.integer("preemptions", static_cast<long long>(turnaround.size()));
    row.integer("over_before", over_before);
    row.integer("rescued", rescued);
    row.number("launches_a_run", static_cast<double>(launches) / trials);
    return row.done();
}

// In slices with a gate before each but the first: how long after the gate was closed no slice runs any more. Closed
// up to three times a run.
static void held(Json &row, const std::string &name, unsigned pieces, const Variant &variant,
                 const std::vector<unsigned> &expected, double run_us, const std::function<void(unsigned)> &slice_of) {
    // A slice's events: behind its gate, and where it ends.
    static CUevent events[2 * PIECES_MAX];
    for (unsigned i = 0; i < 2 * pieces; ++i) {
        if (events[i] == nullptr) CK(cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING));
    }
    volatile unsigned *gate = host->words + 16;
    CUdeviceptr gate_on_device = host->device + 16 * 4;
    std::vector<double> turnaround;
    bool equal = true, once = true;
    int trials = 0, over_before = 0;
    double end = now_us() + SERIES_US;
    for (; trials < TRIALS_MAX && (trials < 3 || now_us() < end); ++trials) {
        clear(variant);
        *gate = 0;
        for (unsigned i = 0; i < pieces; ++i) {
            if (i > 0) CK(cuStreamWaitValue32(stream, gate_on_device, 0, CU_STREAM_WAIT_VALUE_EQ));
            CK(cuEventRecord(events[2 * i], stream));
            slice_of(i);
            CK(cuEventRecord(events[2 * i + 1], stream));
        }
        // Events are in order: so many are done.
        unsigned done = 0;
        auto look = [&] {
            while (done < 2 * pieces && cuEventQuery(events[done]) == CUDA_SUCCESS) ++done;
        };
        for (int count = 0; count < 3; ++count) {
            double close_at = now_us() + run_us * (0.05 + 0.07 * (trials % 10));
            while (now_us() < close_at) {
            }
            look();
            if (done == 2 * pieces) {
                ++over_before;
                break;
            }
            double begin = now_us(), stopped = 0;
            *gate = 1;
            // An even number: a slice has ended, and the next one has not begun. Should it begin yet, it had passed the gate.
            for (unsigned seen = 2 * PIECES_MAX + 1;;) {
                look();
                double now = now_us();
                if (done != seen) seen = done, stopped = now;
                if (done > 0 && done % 2 == 0 && now - stopped > SETTLED_US) break;
                if (now - begin > LIMIT_US) give_up("a slice does not end");
            }
            turnaround.push_back(stopped - begin);
            *gate = 0;
        }
        CK(cuStreamSynchronize(stream));
        equal &= results(variant) == expected;
        once &= every_block_once();
    }
    row.flag(name + "_equal", equal);
    row.flag(name + "_once", once);
    row.raw(name + "_turnaround_p50_us", percentile(turnaround, 0.5));
    row.raw(name + "_turnaround_p99_us", percentile(turnaround, 0.99));
    row.integer(name + "_times", static_cast<long long>(turnaround.size()));
    row.integer(name + "_over_before", over_before);
}

// The form that offsets block indices: few blocks launched for a range of the grid.
static void sub_grid(Json &row, const Variant &variant, const std::vector<unsigned> &expected, double whole_us) {
    auto piece = [&](unsigned i, unsigned pieces, CUdeviceptr counts) {
        Control control = slice(i, pieces);
        unsigned count = control.hi - control.lo;
        control.hi = ~0u;
        std::copy(spec.grid, spec.grid + 3, control.dims);
        launch(variant, &control, counts, stream, count);
    };
    auto run = [&](unsigned pieces, CUdeviceptr counts) {
        for (unsigned i = 0; i < pieces; ++i) piece(i, pieces, counts);
    };
    for (unsigned pieces : {1u, SLICES}) {
        clear(variant);
        run(pieces, ran);
        CK(cuStreamSynchronize(stream));
        std::string name = pieces == 1 ? "whole" : "slices_8";
        row.flag(name + "_equal", results(variant) == expected);
        row.flag(name + "_once", every_block_once());
        row.number(name + "_percent", (median_us([&] { run(pieces, 0); }) / whole_us - 1) * 100, "%.2f");
    }
    // As long as a slice takes is as long as others wait for it: the least number of slices that are within the bound.
    unsigned pieces = 2;
    double us = median_us([&] { run(pieces, 0); });
    for (; us / pieces > SLICE_BOUND_US && pieces < PIECES_MAX; us = median_us([&] { run(pieces, 0); })) ++pieces;
    row.integer("slices_in_bound", pieces);
    row.number("slice_us", us / pieces);
    row.number("slices_in_bound_percent", (us / whole_us - 1) * 100, "%.2f");
    held(row, "held", pieces, variant, expected, us, [&](unsigned i) { piece(i, pieces, ran); });
    // A preemptible launch of so many short blocks goes in slices: as many as the shim makes.
    if (blocks <= WHOLE_GRID_MAX || blocks * EXIT_US <= whole_us / 2) return;
    unsigned used = std::min(std::max(2u, static_cast<unsigned>(std::ceil(whole_us / US_PER_SLICE))), PIECES_MAX);
    us = median_us([&] { run(used, 0); });
    row.integer("slices_in_use", used);
    row.number("slices_in_use_percent", (us / whole_us - 1) * 100, "%.2f");
    held(row, "in_use", used, variant, expected, us, [&](unsigned i) { piece(i, used, ran); });
}

static void prelude(Json &row, const Variant &variant, const std::vector<unsigned> &expected, double whole_us) {
    clear(variant);
    Control control = preemptible(0);
    launch(variant, &control, ran, stream);
    CK(cuStreamSynchronize(stream));
    row.flag("flag_off_equal", results(variant) == expected);
    row.flag("flag_off_once", every_block_once());
    row.flag("flag_off_no_notice", host->words[0] == 0);
    auto percent = [&](double us) { return (us / whole_us - 1) * 100; };
    for (unsigned mask : MASKS) {
        double us = median_us([&] { Control c = preemptible(mask); launch(variant, &c, 0, stream); });
        row.number("flag_off_percent_mask_" + std::to_string(mask), percent(us), "%.2f");
    }
    Control whole = slice(0, 1);
    row.number("no_table_percent", percent(median_us([&] { launch(variant, &whole, 0, stream); })), "%.2f");

    clear(variant);
    auto slices = [&](CUdeviceptr counts) {
        for (unsigned i = 0; i < SLICES; ++i) {
            Control c = slice(i, SLICES);
            launch(variant, &c, counts, stream);
        }
    };
    slices(ran);
    CK(cuStreamSynchronize(stream));
    row.flag("slices_8_equal", results(variant) == expected);
    row.flag("slices_8_once", every_block_once());
    double slices_us = median_us([&] { slices(0); });
    row.number("slices_8_percent", percent(slices_us), "%.2f");
    held(row, "held_8", SLICES, variant, expected, slices_us, [&](unsigned i) {
        Control c = slice(i, SLICES);
        launch(variant, &c, ran, stream);
    });

    Control none = whole;
    none.hi = 0;
    row.number("out_of_slice_ns_a_block", median_us([&] { launch(variant, &none, 0, stream); }) * 1000 / blocks);
    for (unsigned mask : MASKS) {
        raise_flag(mask, ~0u);
        CK(cuStreamSynchronize(urgent));
        double us = median_us([&] { Control c = preemptible(mask); c.notice = 0; launch(variant, &c, 0, stream); });
        row.number("stopped_ns_a_block_mask_" + std::to_string(mask), us * 1000 / blocks);
        raise_flag(mask, 0);
        CK(cuStreamSynchronize(urgent));
    }
    std::string series;
    for (unsigned mask : MASKS) {
        for (bool by_copy : {false, true}) {
            if (mask == 0 ? by_copy : spec.blocks_wait || (by_copy && mask < 15)) continue;
            series += (series.empty() ? "" : ", ") + preempted(variant, mask, by_copy, expected, whole_us);
        }
    }
    row.raw("preempted", "[" + series + "]");
}

int main(int count, char **words) {
    for (const Spec &one : SPECS) {
        if (count > 2 && std::string(words[1]) == one.name) spec = one;
    }
    if (spec.name == nullptr) {
        std::fprintf(stderr, "usage: forms KERNEL ORIGINAL NAME=IMAGE:PARAMETERS...\n");
        return 2;
    }
    no_parameters = std::strcmp(spec.name, "globals") == 0;
    CUdevice device;
    CUcontext context;
    CK(cuInit(0));
    CK(cuDeviceGet(&device, 0));
    CK(cuDevicePrimaryCtxRetain(&context, device));
    CK(cuCtxSetCurrent(context));
    int processors = 0;
    CK(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    CK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
    CK(cuStreamCreateWithPriority(&urgent, CU_STREAM_NON_BLOCKING, -1));
    CK(cuStreamCreateWithPriority(&rescue, CU_STREAM_NON_BLOCKING, -1));
    blocks = spec.grid[0] * spec.grid[1] * spec.grid[2];
    warps = (spec.block[0] * spec.block[1] + 31) / 32;
    const size_t inputs = 67108864;
    CK(cuMemAlloc(&a, inputs * 4));
    CK(cuMemAlloc(&b, inputs * 4));
    CK(cuMemAlloc(&out, spec.results * 4));
    CK(cuMemAlloc(&ran, blocks * 4ull));
    CK(cuMemAlloc(&table, blocks * 4ull));
    CK(cuMemAlloc(&flags, 128 * STRIDE));
    CK(cuMemsetD32(table, 0, blocks));
    CK(cuMemsetD32(flags, 0, 128 * STRIDE / 4));
    host = new HostWords();
    for (char *&image : flag_images) {
        void *address = nullptr;
        CK(cuMemHostAlloc(&address, 128 * STRIDE, CU_MEMHOSTALLOC_PORTABLE));
        std::memset(address, 0, 128 * STRIDE);
        image = static_cast<char *>(address);
    }
    std::vector<float> values(inputs);
    unsigned x = 1;
    for (float &value : values) {
        x = x * 1664525u + 1013904223u;
        value = static_cast<float>(x >> 8) / 16777216.f + 0.1f;
    }
    CK(cuMemcpyHtoD(a, values.data(), inputs * 4));
    CK(cuMemcpyHtoD(b, values.data(), inputs * 4));

    Variant original;
    std::vector<char> image = read_file(words[2]);
    CK(load(original, image));
    int registers = 0, resident = 0;
    auto attributes = [&](const Variant &variant) {
        CK(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, variant.function));
        CK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&resident, variant.function,
                                                       static_cast<int>(spec.block[0] * spec.block[1]), spec.shared_bytes));
    };
    attributes(original);
    clear(original);
    launch(original, nullptr, ran, stream);
    CK(cuStreamSynchronize(stream));
    const std::vector<unsigned> expected = results(original);
    Json json;
    json.string("kernel", spec.name);
    json.integer("blocks", blocks);
    json.integer("registers", registers);
    json.integer("resident_blocks_an_sm", resident);
    json.flag("original_once", every_block_once());
    double whole_us = median_us([&] { launch(original, nullptr, 0, stream); });
    double waves = std::max(1.0, static_cast<double>(blocks) / std::max(1, resident * processors));
    json.number("original_us", whole_us);
    json.number("block_us", whole_us / waves);
    std::string forms;
    for (int i = 3; i < count; ++i) {
        std::string word = words[i];
        size_t equals = word.find('='), colon = word.rfind(':');
        Variant variant;
        variant.transformed = true;
        std::string name = word.substr(0, equals);
        variant.sub_grid = name.find("sub-grid") != std::string::npos;
        // Machine code offsets the index in x only.
        if (name == "sass sub-grid" && spec.grid[1] * spec.grid[2] != 1) continue;
        variant.parameters = static_cast<unsigned>(std::atoi(word.c_str() + colon + 1));
        image = read_file(word.substr(equals + 1, colon - equals - 1));
        Json row;
        row.string("form", name);
        CUresult loaded = image.empty() ? CUDA_ERROR_FILE_NOT_FOUND : load(variant, image);
        row.result("load", loaded);
        if (loaded == CUDA_SUCCESS) {
            attributes(variant);
            row.integer("registers", registers);
            row.integer("resident_blocks_an_sm", resident);
            if (variant.sub_grid) sub_grid(row, variant, expected, whole_us);
            else prelude(row, variant, expected, whole_us);
        }
        forms += (forms.empty() ? "" : ", ") + row.done();
    }
    json.raw("forms", "[" + forms + "]");
    std::printf("%s\n", json.done().c_str());
    return 0;
}
