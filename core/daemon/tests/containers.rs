//! Containers with the core's sockets, and descriptors whose close hangs: root of a container is nobody's admin, and
//! who sends such descriptors waits for them alone.

mod common;

use common::users::{ADMIN, Container, SERVICE, STRANGER, answers, as_user, command, core, high};
use common::{BUILT_IN, Client, Core, hello, policy};
use rustix::fd::AsFd;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tally_ipc::wire;

/// A process that has `program` run in other namespaces.
fn in_container(namespaces: &[&str], core: &Core, request: &str) -> String {
    let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
                  s.sendall(sys.argv[2].encode()+b'\\n')\nprint(s.makefile().readline())";
    let mut command = std::process::Command::new("unshare");
    command.args(namespaces).args(["python3", "-c", script]).arg(&core.admin).arg(request);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn root_of_a_container_is_no_admin_even_with_the_admin_socket() {
    let core = core("");
    let containers: [(&[&str], &str); 3] = [
        (&["--pid", "--fork", "--mount"], "PID namespace"),
        (&["--user", "--map-root-user"], "user namespace"),
        (&["--user", "--map-root-user", "--pid", "--fork", "--mount"], "PID namespace"),
    ];
    for (namespaces, why) in containers {
        for request in
            ["{\"cmd\":\"stop\"}", "{\"cmd\":\"log_record\"}", "{\"cmd\":\"policy_rollback\"}"]
        {
            let answer = in_container(namespaces, &core, request);
            assert!(
                answer.contains("denied") && answer.contains(why),
                "{namespaces:?} {request}: {answer}"
            );
        }
    }
    // Its own mounts alone make no container: services of the init system have them.
    assert!(
        in_container(&["--mount"], &core, "{\"cmd\":\"log_stop\"}")
            .contains("nothing is being recorded")
    );
    core.status();
}

/// Asks at the socket `argv[1]` what an admin would, with descriptors of its own; prints the answers. What is at
/// `argv[2]` it sees without what the host has there.
const ASKS: &str = r#"
import array,json,os,socket,struct,sys
hidden=sys.argv[2]; version=int(sys.argv[3]); out=hidden+'/ld.so.preload'
wasm=os.open(sys.argv[4],os.O_RDONLY); made=os.open(out,os.O_RDWR|os.O_CREAT)
seen=os.listdir(hidden)
for request,fds in [
    ({'cmd':'log_record','path':out,'files':['out']},[made]),
    ({'cmd':'log_record','path':out},[]),
    ({'cmd':'policy_load','path':sys.argv[4],'files':['component']},[wasm]),
    ({'cmd':'policy_load','path':sys.argv[4],'config':'/etc/shadow','files':['component','config']},[wasm,wasm]),
    ({'cmd':'shadow_start','path':sys.argv[4],'files':['component']},[wasm]),
    ({'cmd':'policy_rollback'},[]), ({'cmd':'profiles_clear'},[]), ({'cmd':'stop'},[])]:
    text=json.dumps(request).encode()+b'\n'
    for bytes_ in [text,b'TALLYIPC'+struct.pack('<II',version,len(text))+text]:
        s=socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])
        rights=[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array('i',fds))] if fds else []
        while True:
            try: s.sendmsg([bytes_],rights); break
            except PermissionError: pass
            except BrokenPipeError: break
        try: answer=s.recv(65536)
        except OSError: answer=b'(closed)'
        print(repr(answer),flush=True)
os.write(made,b'mine')
print('done',seen,flush=True)
"#;

/// The audit's finding 4: root of a container, with mounts of its own and a socket of the core.
#[test]
fn a_container_makes_the_core_load_nothing_and_make_no_file() {
    let core = core("");
    let hidden = core.dir.path().join("hidden");
    std::fs::create_dir(&hidden).unwrap();
    let wasm = policy("tally-priority");
    let script = core.dir.path().join("asks.py");
    std::fs::write(&script, ASKS).unwrap();
    let version = tally_ipc::PROTOCOL_VERSION.to_string();
    for socket in [&core.socket, &core.admin] {
        let mut command = std::process::Command::new("unshare");
        let mount = "mount -t tmpfs none \"$3\" && exec python3 \"$1\" \"$2\" \"$3\" \"$4\" \"$5\"";
        command.args(["--mount", "--pid", "--fork", "sh", "-ec", mount, "sh"]);
        command.arg(&script).arg(socket).arg(&hidden).arg(&version).arg(&wasm);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.ends_with("done ['ld.so.preload']\n"), "it has made its own file: {said}");
        let answers: Vec<_> = said.lines().collect();
        assert_eq!(answers.len(), 17, "{said}");
        assert!(!said.contains("\"ok\""), "{said}");
        let denied = answers.iter().filter(|answer| answer.contains("PID namespace")).count();
        assert_eq!(denied, if socket == &core.admin { 8 } else { 0 }, "{said}");
    }
    assert_eq!(std::fs::read_dir(&hidden).unwrap().count(), 0, "nothing on the host");
    let status = core.status();
    assert_eq!(status["policy"]["generation"], 1);
    assert!(status["log"]["file"].is_null() && status["shadow"].is_null(), "{}", status["log"]);
}

/// The end of a TCP connection whose last close waits a minute: its buffer is full, nobody reads.
fn lingering() -> (std::os::fd::OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut here = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (there, _) = listener.accept().unwrap();
    here.set_nonblocking(true).unwrap();
    while here.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&here, Some(Duration::from_secs(60))).unwrap();
    (here.into(), there)
}

/// Its close does not wait any more.
fn give_up(fd: &std::os::fd::OwnedFd) {
    rustix::net::sockopt::set_socket_linger(fd, None).unwrap();
}

/// As soon as the core takes them; the error after a second.
fn send_with(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[std::os::fd::OwnedFd],
    urgent: bool,
) -> rustix::io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let flags = if urgent { SendFlags::OOB } else { SendFlags::empty() } | SendFlags::NOSIGNAL;
    let bytes = [std::io::IoSlice::new(bytes)];
    let began = std::time::Instant::now();
    loop {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        match rustix::net::sendmsg(stream, &bytes, &mut control, flags) {
            Err(rustix::io::Errno::PERM) if began.elapsed() < Duration::from_secs(1) => {
                std::thread::sleep(Duration::from_micros(50));
            }
            sent => return sent,
        }
    }
}

/// Whether sockets can be told to take no descriptors: Linux 6.16.
fn bars_descriptors() -> bool {
    let (here, _there) = UnixStream::pair().unwrap();
    tally_ipc::rights::allow(here.as_fd(), false).is_ok()
}

#[test]
fn descriptors_whose_close_waits_hold_up_nobody_else() {
    hang_in_every_way(core(""), bars_descriptors());
}

/// What a system may lack: sockets that take no descriptors, and tables of descriptors of a thread's own.
const OLDER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#ifdef NO_RIGHTS
int setsockopt(int s, int l, int o, const void *v, socklen_t n) {
    static int (*real)(int, int, int, const void *, socklen_t);
    if (l == SOL_SOCKET && o == 83) { errno = ENOPROTOOPT; return -1; }
    if (!real) real = dlsym(RTLD_NEXT, "setsockopt");
    return real(s, l, o, v, n);
}
#endif
#ifdef NO_TABLES
int unshare(int flags) { errno = EPERM; return -1; }
#endif
"#;

fn core_without(lacks: &[&str], config: &str) -> Core {
    let (dir, mut command) = command(config);
    let (source, library) = (dir.path().join("older.c"), dir.path().join("older.so"));
    std::fs::write(&source, OLDER).unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.args(lacks.iter().map(|what| format!("-DNO_{what}")));
    cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    assert!(cc.status().unwrap().success());
    command.env("LD_PRELOAD", library);
    Core::run(dir, command)
}

/// As before Linux 6.16: the helper threads close every connection.
#[test]
fn without_a_way_to_refuse_descriptors_those_that_hang_hold_up_nobody_else() {
    hang_in_every_way(core_without(&["RIGHTS"], ""), false);
}

#[test]
fn without_a_way_to_close_them_at_once_descriptors_hold_up_nobody_else() {
    hang_in_every_way(core_without(&["RIGHTS", "TABLES"], ""), false);
}

/// Sends `argv[2]` descriptors whose close lingers, each with a connection that is refused, or given up later.
const LINGERS: &str = r#"
import array,resource,signal,socket,struct,sys,time
hard=resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE,(hard,hard))
signal.signal(signal.SIGALRM,lambda *_: None)
kept=[]
listener=socket.socket(); listener.setsockopt(socket.SOL_SOCKET,socket.SO_RCVBUF,2048)
listener.bind(('127.0.0.1',0)); listener.listen()
def lingering():
    here=socket.socket(); here.setsockopt(socket.SOL_SOCKET,socket.SO_SNDBUF,4096)
    here.connect(listener.getsockname()); kept.append(listener.accept()[0])
    here.setblocking(False)
    try:
        while True: here.send(bytes(1<<12))
    except BlockingIOError: pass
    here.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',1,600))
    return here
sent=0
while sent<int(sys.argv[2]):
    here=lingering()
    s=socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])
    try: s.sendmsg([b'x'],[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array('i',[here.fileno()]))]); sent+=1
    except (BrokenPipeError,ConnectionResetError): here.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',0,0))
    # If the core was faster it is this process that would wait.
    signal.setitimer(signal.ITIMER_REAL,0.2); here.close(); signal.setitimer(signal.ITIMER_REAL,0)
print(sent,flush=True)
time.sleep(120)
"#;

/// More than the core keeps of those that it cannot close, before Linux 6.16.
#[test]
fn descriptors_that_linger_are_closed_at_once_with_connections_that_are_refused() {
    let core = core_without(&["RIGHTS"], "[admission]\nhello_timeout_ms = 30000\n");
    let mut hostile = Container::start_with(LINGERS, &core.socket, &["1200"]);
    assert_eq!(hostile.line().trim(), "1200");
    as_user(STRANGER, || Client::best_effort(&core, "c"));
    drop(high(&core));
    answers(&core);
    // Those that are not refused wait for its hello.
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", core.pid())).unwrap().count();
    let start = std::time::Instant::now();
    while fds() > 150 {
        assert!(start.elapsed() < Duration::from_secs(20), "{} descriptors", fds());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn hang_in_every_way(core: Core, bars: bool) {
    let hello = wire::frame(&hello("a", false).encode());
    let ping = wire::frame(&[wire::PING]);
    // How they come: with the start of a frame that is refused, too many, unread behind a frame, urgent, after
    // registering, and at the admin socket.
    for way in 0..7 {
        let (sent, _there) = lingering();
        let began = std::time::Instant::now();
        let _open = as_user(STRANGER, || {
            let at = if way < 5 { &core.socket } else { &core.admin };
            let mut stream = UnixStream::connect(at).unwrap();
            match way {
                0 => {
                    send_with(&stream, &hello[..16], &[sent], false).unwrap();
                    stream.write_all(&hello[16..]).unwrap();
                }
                1 => {
                    let all: Vec<_> = (0..16).map(|_| sent.try_clone().unwrap()).collect();
                    drop(sent);
                    send_with(&stream, &hello, &all, false).unwrap();
                }
                2 => {
                    send_with(&stream, &ping[..16], &[sent.try_clone().unwrap()], false).unwrap();
                    stream.write_all(&ping[16..]).unwrap();
                    // It may be closed already, or take none any more.
                    let sent = [sent];
                    if send_with(&stream, b"x", &sent, false).is_err() {
                        give_up(&sent[0]);
                    }
                }
                3 => drop(send_with(&stream, b"x", &[sent], true).unwrap()),
                4 => {
                    let client = Client::register(&core.socket, &common::hello("b", false));
                    let client = client.unwrap();
                    let sent = [sent];
                    let more = send_with(&client.socket, b"x", &sent, false);
                    assert_eq!(more.is_ok(), !bars, "{more:?}");
                    if more.is_err() {
                        give_up(&sent[0]);
                    }
                    stream = client.socket;
                }
                5 => drop(send_with(&stream, b"no request\n", &[sent], false).unwrap()),
                _ => drop(send_with(&stream, b"{\"cmd\":\"stop\"", &[sent], false).unwrap()),
            }
            stream
        });
        // What it sent is taken and given up meanwhile.
        for _ in 0..20 {
            answers(&core);
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(began.elapsed() < Duration::from_secs(20), "way {way}: {:?}", began.elapsed());
    }
    drop(high(&core));
    // A connection at a time that hangs leaves room for the user's others.
    as_user(STRANGER, || Client::best_effort(&core, "c"));
    let began = std::time::Instant::now();
    let mut core = core;
    core.signal(rustix::process::Signal::TERM);
    assert!(core.wait().success());
    assert!(began.elapsed() < Duration::from_secs(20), "it ends all the same");
}

/// The welcome has descriptors: the core does not wait until it gets rid of them.
#[test]
fn a_client_that_takes_no_descriptors_holds_up_nobody() {
    let core = core("");
    let began = std::time::Instant::now();
    let (fd, _region) = tally_ipc::map::create_client().unwrap();
    for _ in 0..20 {
        let stream = UnixStream::connect(&core.socket).unwrap();
        let barred = tally_ipc::rights::allow(stream.as_fd(), false).is_ok();
        assert_eq!(barred, bars_descriptors());
        wire::send(stream.as_fd(), &hello("a", false).encode(), &[fd.as_fd()]).unwrap();
        let answer = wire::receive(stream.as_fd());
        assert_eq!(answer.is_err(), barred, "{answer:?}");
        answers(&core);
    }
    // A second for each, if it did.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(high(&core));
}

/// Sends the frame `argv[2]` with descriptors of which the last one, for which a receiver of eight has no room, is
/// closed in a minute, until the core takes no more; then says what it was told, how many descriptors the core took
/// of those that came with `argv[3]` further connections, and how many of these it answered at all.
const HANGS: &str = r#"
import array,os,signal,socket,sys,struct,time
null=os.open('/dev/null',os.O_RDONLY)
signal.signal(signal.SIGALRM,lambda *_: None)
kept=[]
def lingering():
    listener=socket.socket(); listener.bind(('127.0.0.1',0)); listener.listen()
    here=socket.create_connection(listener.getsockname()); there,_=listener.accept(); kept.append(there)
    here.setblocking(False)
    try:
        while True: here.send(bytes(1<<16))
    except BlockingIOError: pass
    here.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',1,60))
    return here
def send(fds,most):
    s=socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])
    end=time.monotonic()+most
    while True:
        try:
            s.sendmsg([bytes.fromhex(sys.argv[2])],[(socket.SOL_SOCKET,socket.SCM_RIGHTS,array.array('i',fds))])
            return s,True
        except PermissionError:
            if time.monotonic()>end: return s,False
            time.sleep(0.0002)
        except (BrokenPipeError,ConnectionResetError): return s,False
told=b''
if int(sys.argv[3])==0:
    s,_=send([null],1); told=s.recv(4096)
end=time.monotonic()+60
while int(sys.argv[3])>0 and b'the container in namespace' not in told and time.monotonic()<end:
    # If the core was faster it is this process that would wait.
    l=lingering(); s,took=send([null]*15+[l.fileno()],1)
    signal.setitimer(signal.ITIMER_REAL,0.2); l.close(); signal.setitimer(signal.ITIMER_REAL,0)
    if not took: told=s.recv(4096)
    else: kept.append(s)
took=0; answered=0; all_=[]
for i in range(int(sys.argv[3])):
    s,t=send([null],0); took+=t; all_.append(s)
    if len(all_)==100:
        for s in all_:
            try: answered+=len(s.recv(4096))>0
            except OSError: pass
            s.close()
        all_=[]
print(told[16:].decode('utf8','replace').replace('\n',' ')); print(took,answered,flush=True)
time.sleep(120)
"#;

/// The attack that a container's hung descriptors keep the others out, and, with enough refused connections, everybody.
#[test]
fn a_container_whose_descriptors_hang_keeps_nobody_else_out() {
    let core = core_without(&["TABLES"], "");
    let frame: String =
        wire::frame(&hello("a", false).encode()).iter().map(|byte| format!("{byte:02x}")).collect();
    // More than could be refused and not closed.
    let floods = if bars_descriptors() { "1500" } else { "100" };
    let mut hostile = Container::start_with(HANGS, &core.socket, &[&frame, floods]);
    let told = hostile.line();
    // Its places are taken by what cannot be closed, or its threads.
    let why = ["taken until", "connections that wait to be served"];
    let is_refused = why.iter().any(|why| told.contains(why));
    assert!(told.contains("the container in namespace") && is_refused, "{told}");
    let counts = hostile.line();
    let counts: Vec<usize> = counts.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(counts[1] >= floods.parse::<usize>().unwrap() / 2, "refusals say why: {counts:?}");
    if bars_descriptors() {
        assert_eq!(counts[0], 0, "no descriptor is taken that might have to be closed");
    }
    let threads = std::fs::read_dir(format!("/proc/{}/task", core.pid())).unwrap();
    let names = threads.flatten().map(|t| std::fs::read_to_string(t.path().join("comm")));
    let helpers = names.flatten().filter(|name| name.trim() == "tally-helper").count();
    assert!((8..=16).contains(&helpers), "{helpers} threads");
    // Another container, another user, a service and an admin.
    let mut other = Container::start_with(HANGS, &core.socket, &[&frame, "0"]);
    let told = other.line();
    assert!(told.contains("region") && !told.contains("cannot be"), "it is heard: {told}");
    as_user(STRANGER, || Client::best_effort(&core, "c"));
    drop(high(&core));
    answers(&core);
    // Once it is gone, with what it sent, descriptors from it could be closed.
    drop(hostile);
    let mut core = core;
    core.signal(rustix::process::Signal::TERM);
    assert!(core.wait().success());
}

#[test]
fn a_container_with_any_user_numbers_takes_no_reserved_connection() {
    // Silent connections are kept for long.
    let core = core("[admission]\nhello_timeout_ms = 30000\n");
    let script = format!(
        "import os,socket,sys,time\nheld=[]\nfor uid in [0,{SERVICE},{ADMIN},{STRANGER}]:\n \
         os.setresuid(uid,uid,0)\n for i in range(100):\n  s=socket.socket(socket.AF_UNIX)\n  \
         s.connect(sys.argv[1])\n  held.append(s)\n os.setresuid(0,0,0)\n\
         time.sleep(0.3)\nopen_=0\nfor s in held:\n s.setblocking(False)\n try: s.recv(1)\n \
         except BlockingIOError: open_+=1\nprint(open_,flush=True)\ntime.sleep(60)"
    );
    let mut container = Container::start(&script, &core.socket);
    assert_eq!(container.line().trim(), "32", "an eighth of all, whatever their numbers");
    for uid in [0, SERVICE] {
        as_user(uid, || Client::register(&core.socket, &hello("s", true)).unwrap());
    }
}

/// What a program in a container is told that asks whether it may be high priority.
fn high_in_container(core: &Core) -> String {
    let script = format!(
        "import os,socket,struct,sys\nos.setresuid({SERVICE},{SERVICE},{SERVICE})\n\
         s=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
         s.sendall(b'TALLYIPC'+struct.pack('<IIBB',{},2,{},{}))\nr=s.recv(4096)\n\
         print(r[17:].decode(),flush=True)",
        tally_ipc::PROTOCOL_VERSION,
        wire::PING,
        wire::PING_HIGH
    );
    Container::start(&script, &core.socket).line().trim().into()
}

#[test]
fn programs_in_containers_are_high_priority_only_if_configured() {
    let core = core("");
    let why = high_in_container(&core);
    assert!(why.contains("high_priority.containers"), "{why}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let config = format!(
        "{BUILT_IN}[socket]\nmode = \"0666\"\n[high_priority]\nuids = [{SERVICE}]\ncontainers = true\n"
    );
    let core = Core::start_in(dir, &config, &[]);
    assert_eq!(high_in_container(&core), "");
}
