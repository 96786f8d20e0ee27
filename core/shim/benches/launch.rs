//! What the shim adds to a launch: without Tally's environment, ungated, and
//! with a decision by a core that spins in this process. The driver
//! does nothing, so the figures are the shim's alone; subtract "driver alone".

use criterion::{Criterion, criterion_group, criterion_main};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::AsFd;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tally_ipc::map;
use tally_ipc::ring::{self, Polled};
use tally_ipc::wire::{self, Hello, SharingMode, Welcome};
use tally_shim::{attach, resolve, start, state};

type Ptr = *mut c_void;
type Init = unsafe extern "C" fn(c_uint) -> c_int;
type Synchronize = unsafe extern "C" fn(Ptr) -> c_int;
type LaunchGraph = unsafe extern "C" fn(Ptr, Ptr) -> c_int;
type Instantiate = unsafe extern "C" fn(*mut Ptr, Ptr, u64) -> c_int;
type Launch = unsafe extern "C" fn(
    Ptr,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Ptr,
    *mut Ptr,
    *mut Ptr,
) -> c_int;

fn launch(f: Launch, stream: usize) -> c_int {
    let null = std::ptr::null_mut;
    // SAFETY: the no-op driver reads nothing.
    unsafe { f(0x5000 as Ptr, 1, 1, 1, 32, 1, 1, 0, stream as Ptr, null(), null()) }
}

/// Time of this thread on the CPU, for work that never waits: other programs on
/// the machine then disturb it less.
fn on_cpu(bench: &mut criterion::Bencher<'_>, mut work: impl FnMut()) {
    let now = || {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    bench.iter_custom(|n| {
        let start = now();
        for _ in 0..n {
            work();
        }
        now() - start
    });
}

/// Where the core thread is: `u64::MAX` grants for good, otherwise it decides.
static GRANT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Whether the core thread reads the client's activity all the time.
static LOOKING: AtomicBool = AtomicBool::new(false);

fn core(listener: &UnixListener) {
    let (socket, _) = listener.accept().unwrap();
    let (payload, fds) = wire::receive(socket.as_fd()).unwrap();
    let hello = Hello::decode(&payload).unwrap();
    let client = map::open_client(fds[0].as_fd()).unwrap();
    let (fd, core) = map::create_core().unwrap();
    ring::grant(&core, u64::MAX);
    let welcome = Welcome {
        client_id: 1,
        high_priority: true,
        class_reason: String::new(),
        sharing: SharingMode::Unmanaged,
        spin_ns: 1_000_000,
        fail_hold: false,
        profiles_units: true,
        rewrite: Default::default(),
    };
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    wire::send(socket.as_fd(), &welcome.encode(), &[fd.as_fd(), doorbell.as_fd()]).unwrap();
    while GRANT.load(SeqCst) == u64::MAX {
        let a = &client.activity;
        while LOOKING.load(SeqCst) {
            std::hint::black_box((a.busy_streams.load(SeqCst), a.busy_periods.load(SeqCst)));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut next = hello.first_ticket;
    ring::grant(&core, next);
    loop {
        if let Polled::Request(_) = ring::poll(&client, next) {
            ring::consume(&core, next);
            next += 1;
            ring::grant(&core, next);
            core.heartbeat.fetch_add(1, SeqCst);
        } else {
            std::hint::spin_loop();
        }
    }
}

fn benches(c: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("libcuda.so.1");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/noop.c");
    let built = std::process::Command::new("gcc")
        .args(["-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([library.as_os_str(), source.as_ref()])
        .status();
    assert!(built.unwrap().success());
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: a library without constructors.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    let find = |name: &str| {
        let name = CString::new(name).unwrap();
        // SAFETY: the shim's own dlsym, linked in here.
        unsafe { start::dlsym(handle, name.as_ptr().cast::<c_char>()) }
    };
    // SAFETY: functions of these names have these types.
    let (launch_graph, instantiate, destroy_graph) = unsafe {
        (
            std::mem::transmute::<Ptr, LaunchGraph>(find("cuGraphLaunch")),
            std::mem::transmute::<Ptr, Instantiate>(find("cuGraphInstantiateWithFlags")),
            std::mem::transmute::<Ptr, Synchronize>(find("cuGraphExecDestroy")),
        )
    };
    let real = resolve::in_driver(c"cuLaunchKernel").unwrap().as_ptr();
    // SAFETY: functions of these names have these types.
    let (real, wrapped, init, synchronize) = unsafe {
        (
            std::mem::transmute::<Ptr, Launch>(real),
            std::mem::transmute::<Ptr, Launch>(find("cuLaunchKernel")),
            std::mem::transmute::<Ptr, Init>(find("cuInit")),
            std::mem::transmute::<Ptr, Synchronize>(find("cuStreamSynchronize")),
        )
    };
    assert_ne!(real as usize, wrapped as usize);
    const STREAM: usize = 0x2000;
    c.bench_function("driver alone", |b| on_cpu(b, || assert_eq!(launch(real, STREAM), 0)));
    attach::late();
    assert_eq!(state::mode(), state::MODE_OFF, "run without TALLY_* set");
    c.bench_function("without Tally's environment", |b| {
        on_cpu(b, || assert_eq!(launch(wrapped, STREAM), 0))
    });

    state::reset();
    let socket = dir.path().join("core.sock");
    let listener = Arc::new(UnixListener::bind(&socket).unwrap());
    // SAFETY: no other thread reads the environment now.
    unsafe { std::env::set_var(wire::ENV_SOCKET, &socket) };
    std::thread::spawn(move || core(&listener));
    // SAFETY: the no-op driver's.
    assert_eq!(unsafe { init(0) }, 0);
    let client = state::client().unwrap();
    launch(wrapped, STREAM);
    assert!(state::is_ungated());
    c.bench_function("ungated, a stream", |b| on_cpu(b, || assert_eq!(launch(wrapped, STREAM), 0)));
    launch(wrapped, 0);
    c.bench_function("ungated, default stream", |b| {
        on_cpu(b, || assert_eq!(launch(wrapped, 0), 0))
    });
    // As a core does that spins: it reads what tells it whether this program is busy.
    LOOKING.store(true, SeqCst);
    c.bench_function("ungated, while a core looks at it", |b| {
        on_cpu(b, || assert_eq!(launch(wrapped, STREAM), 0))
    });
    LOOKING.store(false, SeqCst);
    c.bench_function("ungated, two streams in turn", |b| {
        on_cpu(b, || assert_eq!(launch(wrapped, STREAM) + launch(wrapped, STREAM + 64), 0))
    });
    c.bench_function("ungated, launch and synchronise", |b| {
        on_cpu(b, || {
            launch(wrapped, STREAM + 128);
            // SAFETY: the no-op driver's.
            assert_eq!(unsafe { synchronize((STREAM + 128) as Ptr) }, 0);
        })
    });
    let mut exec = std::ptr::null_mut();
    // SAFETY: the no-op driver's.
    unsafe {
        assert_eq!(instantiate(&mut exec, 0x8000 as Ptr, 0), 0);
        assert_eq!(launch_graph(exec, STREAM as Ptr), 0);
    }
    c.bench_function("ungated, a graph", |b| {
        // SAFETY: the no-op driver's.
        on_cpu(b, || assert_eq!(unsafe { launch_graph(exec, STREAM as Ptr) }, 0))
    });
    c.bench_function("high priority, instantiate and destroy a graph", |b| {
        on_cpu(b, || {
            let mut exec = std::ptr::null_mut();
            // SAFETY: the no-op driver's.
            unsafe {
                assert_eq!(instantiate(&mut exec, 0x8000 as Ptr, 0), 0);
                assert_eq!(destroy_graph(exec), 0);
            }
        })
    });
    let before = client.activity.next_ticket.load(SeqCst);
    GRANT.store(0, SeqCst);
    while state::is_ungated() {
        std::hint::spin_loop();
    }
    // Two spinning threads: on a machine with less than two free CPUs the mean
    // says how it shares its CPUs out, so the distribution is given instead.
    let mut times: Vec<u64> = (0..100_000)
        .map(|_| {
            let start = tally_ipc::wait::now_ns();
            launch(wrapped, STREAM);
            tally_ipc::wait::now_ns() - start
        })
        .collect();
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize];
    println!(
        "decided by a spinning core: p10 {} ns, p50 {} ns, p90 {} ns, p99 {} ns",
        at(0.1),
        at(0.5),
        at(0.9),
        at(0.99)
    );
    assert!(client.activity.next_ticket.load(SeqCst) > before, "decisions were asked for");
}

criterion_group!(launches, benches);
criterion_main!(launches);
