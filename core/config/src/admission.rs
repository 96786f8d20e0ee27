//! `[socket]`, `[admission]`, `[high_priority]` and `[admin]`: who may connect where, and take how much.

use crate::{Config, ConfigError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tally_contract::limits::{CLIENTS_MAX, KERNELS_MAX, WEIGHT_MAX};
use tally_ipc::wire;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Socket {
    /// Path of the socket at which programs register. Default:
    /// `$XDG_RUNTIME_DIR/tally/clients/core.sock`, else `/run/tally/clients/core.sock` for root, else
    /// `~/.local/state/tally/clients/core.sock`, or `/run/user/UID/tally/clients/core.sock` without `$HOME`.
    /// Mount its folder into containers read-only.
    pub path: Option<PathBuf>,
    /// Permissions of the socket, octal, at most 0777. If its folder is missing it is made, and whoever
    /// may open the socket may enter it.
    pub mode: String,
}

impl Default for Socket {
    fn default() -> Self {
        Socket { path: None, mode: "0600".into() }
    }
}

fn mode_bits(name: &str, mode: &str) -> Result<u32, ConfigError> {
    u32::from_str_radix(mode, 8).ok().filter(|m| *m <= 0o777).ok_or_else(|| {
        ConfigError::Value(format!(
            "{name} is {mode:?}: expected octal permissions such as \"0600\""
        ))
    })
}

impl Socket {
    /// The permissions as a number.
    ///
    /// # Errors
    /// If it is not an octal number up to 0777.
    pub fn mode_bits(&self) -> Result<u32, ConfigError> {
        mode_bits("socket.mode", &self.mode)
    }

    /// The configured path, or the default one.
    pub fn path(&self) -> PathBuf {
        self.path.clone().unwrap_or_else(wire::default_socket)
    }
}

/// `[admission]`. What its quotas are for: `core/daemon/src/quota.rs`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admission {
    /// Clients served at once; further ones are refused with the reason. There may be fewer: each client
    /// needs three of the core's file descriptors.
    #[schemars(range(min = 1, max = CLIENTS_MAX))]
    pub clients_max: usize,
    /// Best-effort clients of one untrusted user. Untrusted: in a container, or neither root, the core's
    /// user, an admin nor in `high_priority.uids`.
    #[schemars(range(min = 1, max = CLIENTS_MAX))]
    pub user_clients_max: usize,
    /// Clients out of `clients_max` that only high-priority programs may become; at most a quarter of
    /// `clients_max`.
    #[schemars(range(max = CLIENTS_MAX))]
    pub reserved_clients: usize,
    /// Registrations of one untrusted user (see `user_clients_max`) in one second. Further ones wait up
    /// to 0.5 s and are then refused.
    #[schemars(range(min = 1, max = 10_000))]
    pub user_joins_per_s: u32,
    /// Kernels (name, image, grid, block) that the clients of one untrusted user (see
    /// `user_clients_max`) may add to the core's table.
    #[schemars(range(min = 1, max = KERNELS_MAX))]
    pub user_kernels_max: u32,
    /// Floors that best-effort programs may have together by asking (`--min-share`, the label `min-share`), percent of
    /// GPU time. They take from high-priority programs. 0: none, whatever programs ask for; admins may give floors all
    /// the same.
    #[schemars(range(max = 90))]
    pub min_share_percent_max: u32,
    /// Floors that the programs of one untrusted user (see `user_clients_max`) may have together by asking, percent of
    /// GPU time.
    #[schemars(range(max = 90))]
    pub user_min_share_percent_max: u32,
    /// Weight of a client of an untrusted user (see `user_clients_max`), at most; larger ones are lowered to it.
    #[schemars(range(min = 1, max = WEIGHT_MAX))]
    pub user_weight_max: u32,
    /// A connection that has sent no request after this time is closed.
    #[schemars(range(min = 10, max = 60_000))]
    pub hello_timeout_ms: u64,
}

impl Default for Admission {
    fn default() -> Self {
        Admission {
            clients_max: 256,
            user_clients_max: 64,
            reserved_clients: 32,
            user_joins_per_s: 20,
            user_kernels_max: 16_384,
            min_share_percent_max: 0,
            user_min_share_percent_max: 20,
            user_weight_max: 1,
            hello_timeout_ms: 1_000,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct HighPriority {
    /// Users whose programs may be high priority. Programs of others are admitted as best effort, and
    /// their status says so. Default: the core's user and root.
    pub uids: Option<Vec<u32>>,
    /// Let the users in `uids` register as high priority from containers too (processes in another PID
    /// or user namespace).
    pub containers: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Path of the socket for admin requests: every `tallyctl` command that talks to the core, except
    /// `run`. Default: `X/admin/NAME` if programs register at `X/clients/NAME`. It must not be in the
    /// clients' folder.
    pub socket: Option<PathBuf>,
    /// Permissions of the admin socket, octal, at most 0777. Whoever may open it may read the status.
    pub mode: String,
    /// Users that may load policies and stop the core, besides the core's user and root. Nobody in a
    /// container may.
    pub uids: Vec<u32>,
}

impl Default for Admin {
    fn default() -> Self {
        Admin { socket: None, mode: "0600".into(), uids: Vec::new() }
    }
}

impl Admin {
    /// The permissions as a number.
    ///
    /// # Errors
    /// If it is not an octal number up to 0777.
    pub fn mode_bits(&self) -> Result<u32, ConfigError> {
        mode_bits("admin.mode", &self.mode)
    }
}

impl Config {
    /// The admin socket's path in force.
    ///
    /// # Errors
    /// If none is named and none follows from the clients' socket, or a container that gets the clients' folder would
    /// get it, too.
    pub fn admin_socket(&self) -> Result<PathBuf, ConfigError> {
        let clients = self.socket.path();
        let admin = self.admin.socket.clone().or_else(|| wire::admin_socket_of(&clients)).ok_or_else(|| {
            ConfigError::Value(format!(
                "socket.path is {}, whose folder is not named `{}`: name it so, or name the admin socket, too \
                 (admin.socket, --admin-socket), in a folder that is not within the clients'",
                clients.display(),
                wire::CLIENTS_FOLDER
            ))
        })?;
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.into());
        see_that_apart(&absolute(&clients), &absolute(&admin))?;
        Ok(admin)
    }
}

/// The folder of a socket.
pub fn socket_folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// See that the admin socket is not within the folder of the clients' socket. Both paths from the root.
///
/// # Errors
/// If it is.
pub fn see_that_apart(clients: &Path, admin: &Path) -> Result<(), ConfigError> {
    let folder = socket_folder(clients);
    if admin.starts_with(folder) {
        return Err(ConfigError::Value(format!(
            "admin.socket is {}, within {}, the folder of the clients' socket, which \
             containers get: choose one outside",
            admin.display(),
            folder.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admin_of(text: &str) -> Result<PathBuf, String> {
        toml::from_str::<Config>(text).unwrap().admin_socket().map_err(|e| e.to_string())
    }

    #[test]
    fn the_admin_socket_is_never_in_the_folder_that_containers_get() {
        assert_eq!(admin_of("[socket]\npath = \"/r/clients/s\"").unwrap(), Path::new("/r/admin/s"));
        let named = "[socket]\npath = \"/r/s\"\n[admin]\nsocket = \"/a/s\"";
        assert_eq!(admin_of(named).unwrap(), Path::new("/a/s"));
        let error = admin_of("[socket]\npath = \"/r/s\"").unwrap_err();
        assert!(error.contains("/r/s") && error.contains("--admin-socket"), "{error}");
        for within in ["/r/t", "/r/admin/s", "/r/s"] {
            let error =
                admin_of(&format!("[socket]\npath = \"/r/s\"\n[admin]\nsocket = \"{within}\""))
                    .unwrap_err();
            assert!(error.contains(within) && error.contains("containers"), "{error}");
        }
    }
}
