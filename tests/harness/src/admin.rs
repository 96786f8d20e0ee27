//! Admin requests with the files that they name.

use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use tally_ipc::admin::File;

/// The files that a request names, opened as `tallyctl` does: the core opens none. Those that cannot be are left out.
pub fn files_of(request: &Value) -> Vec<File> {
    use tally_ipc::admin;
    let path = |value: &Value| value.as_str().map(PathBuf::from);
    let policy = |prefix: &str, file: &Value, config: &Value| {
        let Some(file) = path(file) else { return Vec::new() };
        admin::policy(prefix, &file, path(config).as_deref()).unwrap_or_default()
    };
    match request["cmd"].as_str() {
        Some("policy_load" | "shadow_start") => policy("", &request["path"], &request["config"]),
        Some("ab_start") => ["a", "b"]
            .into_iter()
            .flat_map(|arm| {
                policy(&format!("{arm}."), &request[arm]["file"], &request[arm]["config_file"])
            })
            .collect(),
        Some("log_record") => {
            let out = path(&request["path"]).map(|file| admin::create("out", &file));
            out.and_then(Result::ok).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// Send a request with the files that it names.
///
/// # Errors
/// If it cannot be sent.
pub fn send(socket: &UnixStream, request: &Value) -> std::io::Result<()> {
    send_with(socket, request, &files_of(request))
}

/// Send a request with these files.
///
/// # Errors
/// If it cannot be sent.
pub fn send_with(socket: &UnixStream, request: &Value, files: &[File]) -> std::io::Result<()> {
    let mut request = request.clone();
    if !files.is_empty() {
        request["files"] = files.iter().map(|file| file.role.as_str()).collect();
    }
    tally_ipc::admin::send(socket, format!("{request}\n").as_bytes(), files)
}
