//! Other users and containers. Users are played by threads of root; a test that cannot do that fails and says so.

use super::{BUILT_IN, Client, Core, admin, hello};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

pub const STRANGER: u32 = 12_345;
pub const ADMIN: u32 = 12_346;
pub const SERVICE: u32 = 12_347;

/// Run as another user, on a thread of its own: credentials belong to the thread, and a socket tells those of the
/// thread that connected.
pub fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    assert!(rustix::process::geteuid().is_root(), "this test needs root to act as other users");
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            work()
        });
        running.join().unwrap()
    })
}

/// A core whose sockets everybody may open.
pub fn core(more: &str) -> Core {
    let (dir, command) = command(more);
    Core::run(dir, command)
}

/// The same before it is started.
pub fn command(more: &str) -> (tempfile::TempDir, std::process::Command) {
    let config = format!(
        "{BUILT_IN}[socket]\nmode = \"0666\"\n[admin]\nmode = \"0666\"\nuids = [{ADMIN}]\n\
         [high_priority]\nuids = [0, {SERVICE}]\n{more}"
    );
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let command = Core::command(dir.path(), &config, &[]);
    (dir, command)
}

pub fn high(core: &Core) -> Client {
    let client = as_user(SERVICE, || Client::register(&core.socket, &hello("service", true)));
    let client = client.expect("the high-priority service is served");
    assert!(client.welcome.high_priority, "{}", client.welcome.class_reason);
    client
}

/// How long an admin waits for an answer.
pub fn answers(core: &Core) -> Duration {
    let began = std::time::Instant::now();
    let answer =
        as_user(ADMIN, || admin(&core.admin, &json!({"cmd": "log_stop"}))).expect("an answer");
    assert_eq!(answer["error"]["message"], "nothing is being recorded", "{answer}");
    let waited = began.elapsed();
    assert!(waited < super::PATIENCE, "{waited:?}");
    waited
}

/// Python in a PID namespace of its own, until it is dropped.
pub struct Container(std::process::Child, BufReader<std::process::ChildStdout>);

impl Container {
    pub fn start(script: &str, socket: &Path) -> Self {
        Self::start_with(script, socket, &[])
    }

    pub fn start_with(script: &str, socket: &Path, more: &[&str]) -> Self {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "python3", "-c", script]).arg(socket);
        let mut child = command.args(more).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Container(child, said)
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
