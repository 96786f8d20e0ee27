//! How clients share the GPU: what was asked for, what is in force, and why.

use crate::config::{SharingChoice, SharingMode as Config};
use crate::error::CoreError;
use crate::mps::{self, MpsError, PrivateDaemon};
use crate::refresh;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tally_admin::{MpsStatus, SharingStatus};
use tally_engine::policy::{self, Class};
use tally_ipc::wire;

/// There is an NVIDIA driver if this exists.
const DEVICE: &str = "/dev/nvidiactl";

/// The sharing mode in force, with what the core runs for it.
enum InForce {
    Mps { pipes: PathBuf, private: Option<PrivateDaemon> },
    Timeslice,
    None,
}

pub struct SharingMode {
    config: Config,
    in_force: InForce,
    reason: String,
    refresh: Option<refresh::Shown>,
}

/// Folder of the pipes of an MPS daemon that the core did not start.
fn shared_pipes(config: &Config) -> PathBuf {
    config.mps.pipe_directory.clone().unwrap_or_else(|| {
        std::env::var_os(mps::ENV_PIPE_DIRECTORY)
            .filter(|d| !d.is_empty())
            .map_or_else(|| mps::DEFAULT_PIPE_DIRECTORY.into(), PathBuf::from)
    })
}

/// Why whoever serves there is not to be believed: clients would send it their work.
fn strangers(pipes: &Path) -> Option<String> {
    let uid = std::fs::metadata(pipes).ok()?.uid();
    of_a_stranger(pipes, uid, rustix::process::geteuid().as_raw())
}

fn of_a_stranger(pipes: &Path, uid: u32, own: u32) -> Option<String> {
    (uid != 0 && uid != own).then(|| {
        format!(
            "{} belongs to user {uid}, neither root nor the core's: not used for MPS",
            pipes.display()
        )
    })
}

impl SharingMode {
    /// Decide, and start what is needed. `clients` is the folder of the clients' socket, which
    /// containers get; `admins` that of the admin socket. Must run inside a `LocalSet`.
    ///
    /// # Errors
    /// If MPS is required and cannot be had.
    pub async fn establish(
        config: &Config,
        clients: &Path,
        admins: &Path,
    ) -> Result<Self, CoreError> {
        let pipes = shared_pipes(config);
        let strangers = strangers(&pipes);
        if let Some(why) = &strangers {
            tracing::warn!("{why}");
        }
        let (in_force, reason) = match config.mode {
            SharingChoice::None => (InForce::None, "asked for".to_owned()),
            SharingChoice::Timeslice => (InForce::Timeslice, "asked for".to_owned()),
            SharingChoice::Auto if !Path::new(DEVICE).exists() => {
                tracing::warn!(
                    "{DEVICE} is missing: until this core starts again it lets programs share the GPU as they do \
                     without it; start it once NVIDIA's driver is loaded"
                );
                (InForce::None, format!("no NVIDIA device ({DEVICE} is missing)"))
            }
            SharingChoice::Auto | SharingChoice::Mps
                if strangers.is_none() && mps::is_serving(&config.mps.control, &pipes).await =>
            {
                let reason = format!("an MPS daemon serves at {}", pipes.display());
                (InForce::Mps { pipes, private: None }, reason)
            }
            SharingChoice::Auto => {
                let none = || format!("no MPS daemon serves at {}", pipes.display());
                (InForce::Timeslice, strangers.unwrap_or_else(none))
            }
            SharingChoice::Mps => Self::private(config, clients, admins, pipes).await?,
        };
        tracing::info!(asked = config.mode.as_str(), in_force = name(&in_force), %reason, "sharing");
        let refresh = match in_force {
            InForce::Mps { .. } => config.mps.refresh().map(refresh::shown),
            _ => None,
        };
        Ok(SharingMode { config: config.clone(), in_force, reason, refresh })
    }

    async fn private(
        config: &Config,
        clients: &Path,
        admins: &Path,
        shared: PathBuf,
    ) -> Result<(InForce, String), CoreError> {
        let outcome = if config.mps.manage {
            start_private(config, clients, admins).await.map_err(|error| error.to_string())
        } else {
            Err(format!("none serves at {} and sharing.mps.manage is false", shared.display()))
        };
        match outcome {
            Ok((pipes, private)) => Ok((
                InForce::Mps { pipes, private: Some(private) },
                "asked for; the core keeps a private MPS daemon".into(),
            )),
            Err(why) if config.required => Err(CoreError::SharingMode(format!("mps: {why}"))),
            Err(why) => {
                let (instead, lack) = without_mps(Path::new(DEVICE).exists());
                tracing::warn!(
                    "MPS cannot be had, sharing mode is {}{lack}: {why}",
                    name(&instead)
                );
                Ok((instead, format!("mps cannot be had{lack}: {why}")))
            }
        }
    }

    /// What a client of this class is told.
    pub fn for_client(&self, class: Class) -> wire::SharingMode {
        match &self.in_force {
            InForce::None => wire::SharingMode::Unmanaged,
            InForce::Timeslice => wire::SharingMode::TimeSlice {
                slice_us: match class {
                    Class::High => self.config.timeslice.high_us,
                    Class::BestEffort => self.config.timeslice.best_effort_us,
                },
                shared_us: match class {
                    Class::High => self.config.timeslice.high_us,
                    Class::BestEffort => self.config.timeslice.shared_us(),
                },
                linger_us: match class {
                    Class::High => self.config.timeslice.linger_us,
                    Class::BestEffort => 0,
                },
            },
            InForce::Mps { pipes, .. } => wire::SharingMode::Mps {
                pipe_directory: pipes.display().to_string(),
                client_priority: u32::from(
                    class == Class::BestEffort && self.config.mps.client_priority,
                ),
                thread_percent: match class {
                    Class::High => 100,
                    Class::BestEffort => self.config.mps.best_effort_percent,
                },
            },
        }
    }

    pub fn sharing(&self) -> policy::SharingMode {
        match self.in_force {
            InForce::Timeslice => policy::SharingMode::TimeSliced,
            InForce::Mps { .. } | InForce::None => policy::SharingMode::Concurrent,
        }
    }

    /// Whether clients are expected to be MPS clients.
    pub fn is_mps(&self) -> bool {
        matches!(self.in_force, InForce::Mps { .. })
    }

    /// Changes of context, if there are to be any: the program, if it is configured, and what is shown.
    pub fn refresh(&self) -> Option<(Option<PathBuf>, refresh::Shown)> {
        Some((self.config.mps.refresh_program.clone(), self.refresh.clone()?))
    }

    pub fn status(&self) -> SharingStatus {
        SharingStatus {
            asked: self.config.mode.as_str().into(),
            in_force: name(&self.in_force).into(),
            reason: self.reason.clone(),
            mps: match &self.in_force {
                InForce::Mps { private: Some(daemon), .. } => Some(daemon.status()),
                InForce::Mps { pipes, private: None } => Some(MpsStatus {
                    pipe_directory: pipes.clone(),
                    managed: false,
                    state: "not watched".into(),
                    restarts: 0,
                    pid: None,
                }),
                _ => None,
            },
            refresh: self.refresh.as_ref().map(|shown| shown.borrow().clone()),
        }
    }

    /// Stops the MPS daemon if the core started it and it is not to be kept for the next one.
    pub async fn end(self, keeps_mps: bool) {
        match self.in_force {
            InForce::Mps { private: Some(daemon), .. } if keeps_mps => daemon.leave().await,
            InForce::Mps { private: Some(daemon), .. } => daemon.stop().await,
            _ => {}
        }
    }
}

/// Start a daemon with its pipes where clients can open them and its logs where they cannot.
async fn start_private(
    config: &Config,
    clients: &Path,
    admins: &Path,
) -> Result<(PathBuf, PrivateDaemon), MpsError> {
    let absolute = |folder: &Path| std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    let pipes = match &config.mps.pipe_directory {
        Some(pipes) => pipes.clone(),
        None => {
            let above = absolute(clients).join("mps");
            mps::make(&above)?;
            above.join("pipe")
        }
    };
    let logs = absolute(admins).join("mps-log");
    let private = PrivateDaemon::start(&config.mps.control, &pipes, &logs).await?;
    Ok((pipes, private))
}

/// What serves where MPS was asked for and cannot be had, and why if it is not time slices.
fn without_mps(has_device: bool) -> (InForce, String) {
    if has_device {
        return (InForce::Timeslice, String::new());
    }
    // Time slices are set through the device: they would not be in force either.
    (InForce::None, format!(", and there is no NVIDIA device ({DEVICE} is missing)"))
}

fn name(in_force: &InForce) -> &'static str {
    match in_force {
        InForce::Mps { .. } => "mps",
        InForce::Timeslice => "timeslice",
        InForce::None => "none",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_no_time_slices_are_said_to_be_in_force() {
        let (instead, lack) = without_mps(false);
        assert_eq!(name(&instead), "none");
        assert!(lack.contains(DEVICE), "{lack}");
        assert_eq!(name(&without_mps(true).0), "timeslice");
    }

    #[test]
    fn only_roots_and_ones_own_mps_daemon_is_used() {
        let pipes = Path::new("/tmp/nvidia-mps");
        assert_eq!(of_a_stranger(pipes, 0, 7), None);
        assert_eq!(of_a_stranger(pipes, 7, 7), None);
        let why = of_a_stranger(pipes, 1000, 7).unwrap();
        assert!(why.contains("/tmp/nvidia-mps belongs to user 1000"), "{why}");
        assert_eq!(strangers(Path::new("/nonexistent")), None, "nobody's");
    }
}
