//! Telling why a program is not governed: a line in the log that `TALLY_SHIM_LOG` names, and a message to
//! the core, which shows it in its status. Neither waits.

use crate::entry::PROTOCOL;
use crate::sys::{self, Text, call, variable};

/// First bytes of every frame: `tally_ipc::wire::FRAME_MAGIC`.
const MAGIC: &str = "TALLYIPC";
pub const NOTICE: u8 = 2;
const NAME_BYTES_MAX: usize = 256;
const FRAME_BYTES_MAX: usize = 1024;
/// Room for a path in `sockaddr_un`, its NUL included.
const SOCKET_BYTES_MAX: usize = 108;

const AF_UNIX: usize = 1;
/// `SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC`.
const STREAM: usize = 1 | 0o4000 | 0o2_000_000;
const NO_SIGNAL_NO_WAIT: usize = 0x4040;
/// `O_WRONLY | O_CREAT | O_APPEND | O_NOCTTY | O_NONBLOCK | O_CLOEXEC`.
const APPEND: usize = 0o1 | 0o100 | 0o2000 | 0o400 | 0o4000 | 0o2_000_000;

/// Tell it to the log and to the core.
pub fn not_governed<const N: usize>(reason: &Text<N>) {
    log(reason);
    let mut name = Text::<NAME_BYTES_MAX>::new();
    program(&mut name);
    let mut frame = Text::<FRAME_BYTES_MAX>::new();
    make_frame(&mut frame, &name, reason);
    send(&frame);
}

fn log<const N: usize>(reason: &Text<N>) {
    let Some(path) = variable(c"TALLY_SHIM_LOG") else { return };
    let mut line = Text::<FRAME_BYTES_MAX>::new();
    // SAFETY: no arguments; then texts of our own and of the environment.
    unsafe {
        let pid = call(sys::GETPID, [0; 6]) as usize;
        line.str("[").number(pid).str("] not governed: ");
        line.bytes(reason.at(), reason.len()).str("\n");
        let file = call(sys::OPEN, [path as usize, APPEND, 0o666, 0, 0, 0]);
        if file >= 0 {
            call(sys::WRITE, [file as usize, line.at() as usize, line.len(), 0, 0, 0]);
            call(sys::CLOSE, [file as usize, 0, 0, 0, 0, 0]);
        }
    }
}

/// The program's name, as the shim gives it.
fn program(name: &mut Text<NAME_BYTES_MAX>) {
    if let Some(told) = variable(c"TALLY_NAME") {
        // SAFETY: the environment's, NUL-terminated.
        unsafe { name.c_str(told) };
        return;
    }
    let mut path = [const { core::mem::MaybeUninit::<u8>::uninit() }; 1024];
    let at = path.as_mut_ptr().cast::<u8>();
    let file = c"/proc/self/exe".as_ptr() as usize;
    // SAFETY: a buffer of 1024; only what was written is read.
    unsafe {
        let bytes = call(sys::READLINK, [file, at as usize, 1024, 0, 0, 0]);
        if bytes > 0 {
            let end = bytes as usize;
            let mut start = end;
            while start > 0 && at.add(start - 1).read_volatile() != b'/' {
                start -= 1;
            }
            name.bytes(at.add(start), end - start);
        }
    }
}

/// Makes the frame that `tally_ipc::wire` makes of the same values.
fn make_frame<const N: usize, const M: usize>(
    frame: &mut Text<FRAME_BYTES_MAX>,
    name: &Text<N>,
    reason: &Text<M>,
) {
    let bytes = 1 + 4 + name.len() + 4 + reason.len();
    frame.str(MAGIC).word(PROTOCOL).word(bytes as u32).byte(NOTICE);
    // SAFETY: texts of our own.
    unsafe {
        frame.word(name.len() as u32).bytes(name.at(), name.len());
        frame.word(reason.len() as u32).bytes(reason.at(), reason.len());
    }
}

/// To the core, if it listens and takes it at once.
fn send(frame: &Text<FRAME_BYTES_MAX>) {
    let mut address = Text::<{ 2 + SOCKET_BYTES_MAX }>::new();
    address.byte(AF_UNIX as u8);
    address.byte(0);
    socket_path(&mut address);
    let bytes = address.len() + 1;
    if address.terminated().is_none() {
        return;
    }
    // SAFETY: an address and a frame of our own; the socket is closed again.
    unsafe {
        let socket = call(sys::SOCKET, [AF_UNIX, STREAM, 0, 0, 0, 0]);
        if socket < 0 {
            return;
        }
        let socket = socket as usize;
        if call(sys::CONNECT, [socket, address.at() as usize, bytes, 0, 0, 0]) == 0 {
            let (at, bytes) = (frame.at() as usize, frame.len());
            call(sys::SENDTO, [socket, at, bytes, NO_SIGNAL_NO_WAIT, 0, 0]);
        }
        call(sys::CLOSE, [socket, 0, 0, 0, 0, 0]);
    }
}

/// Where the core listens, as `tally_ipc::wire::default_socket` has it.
fn socket_path<const N: usize>(path: &mut Text<N>) {
    // SAFETY: values of the environment are NUL-terminated; `getuid` takes nothing.
    unsafe {
        if let Some(named) = variable(c"TALLY_SOCKET") {
            path.c_str(named);
        } else if let Some(folder) = variable(c"XDG_RUNTIME_DIR") {
            path.c_str(folder).str("/tally/clients/core.sock");
        } else {
            match call(sys::GETUID, [0; 6]) as usize {
                0 => path.str("/run/tally/clients/core.sock"),
                uid => match variable(c"HOME") {
                    Some(home) => path.c_str(home).str("/.local/state/tally/clients/core.sock"),
                    None => path.str("/run/user/").number(uid).str("/tally/clients/core.sock"),
                },
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_ipc::wire;

    #[test]
    fn the_frame_is_the_protocols() {
        assert_eq!((PROTOCOL, NOTICE), (tally_ipc::PROTOCOL_VERSION, wire::NOTICE));
        let mut name = Text::<NAME_BYTES_MAX>::new();
        name.str("train");
        let mut reason = Text::<64>::new();
        reason.str("because");
        let mut frame = Text::new();
        make_frame(&mut frame, &name, &reason);
        // SAFETY: its own bytes.
        let made = unsafe { std::slice::from_raw_parts(frame.at(), frame.len()) };
        let notice = wire::Notice { name: "train".into(), reason: "because".into() };
        assert_eq!(made, wire::frame(&notice.encode()));
    }

    #[test]
    fn the_socket_is_the_one_that_clients_look_for() {
        let mut path = Text::<256>::new();
        socket_path(&mut path);
        // SAFETY: its own bytes.
        let path = unsafe { std::slice::from_raw_parts(path.at(), path.len()) };
        let expected = std::env::var_os(wire::ENV_SOCKET)
            .map_or_else(wire::default_socket, std::path::PathBuf::from);
        assert_eq!(path, expected.as_os_str().as_encoded_bytes());
        for shared in ["/tmp", "/var/tmp", "/dev/shm"] {
            assert!(!expected.starts_with(shared), "{} is in {shared}", expected.display());
        }
    }

    /// Runs the test above anew with other variables, empty ones included.
    #[test]
    fn the_socket_is_the_same_whatever_variables_are_missing() {
        let this = "report::tests::the_socket_is_the_one_that_clients_look_for";
        for set in [
            &[][..],
            &[("XDG_RUNTIME_DIR", ""), ("HOME", "")],
            &[("HOME", "/home/somebody")],
            &[("HOME", "/home/somebody"), ("XDG_RUNTIME_DIR", "/run/user/7")],
        ] {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", this]).env_clear().envs(set.iter().copied());
            let output = again.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{set:?}: {said}");
        }
    }
}
