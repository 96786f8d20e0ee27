use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// How the core uses MPS. Why it refreshes: [`crate::refresh`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Mps {
    /// Start, watch and stop a private MPS daemon, unless one serves `pipe_directory` already.
    pub manage: bool,
    /// Give best-effort clients MPS's lower client priority.
    pub client_priority: bool,
    /// SMs that a best-effort client finds on the GPU, percent (`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`). It cannot change
    /// while the client runs. A client that was started with the variable keeps its own. Below 100 the driver makes no
    /// green contexts: no launch is limited to SMs.
    #[schemars(range(min = 1, max = 100))]
    pub best_effort_percent: u32,
    /// Folder of the MPS daemon's pipes. Default for a daemon that runs already:
    /// `$CUDA_MPS_PIPE_DIRECTORY`, else `/tmp/nvidia-mps`; for one that the core starts: `mps/pipe` beside
    /// the socket.
    pub pipe_directory: Option<PathBuf>,
    /// The MPS control program.
    pub control: PathBuf,
    /// How often the GPU is made to change its context (by `refresh_program`) while clients of both
    /// classes are connected; without it, MPS becomes about a tenth slower. Takes the memory of one more
    /// context. 0: never.
    #[schemars(range(max = 3_600_000))]
    pub refresh_ms: u64,
    /// Program that forces a change of context every `refresh_ms`. Default: `tally-refresh` beside the
    /// core.
    pub refresh_program: Option<PathBuf>,
}

impl Default for Mps {
    fn default() -> Self {
        Mps {
            manage: true,
            client_priority: true,
            best_effort_percent: 100,
            pipe_directory: None,
            control: "nvidia-cuda-mps-control".into(),
            refresh_ms: 500,
            refresh_program: None,
        }
    }
}

impl Mps {
    /// Interval between two refreshes; `None` if there are none.
    pub fn refresh(&self) -> Option<Duration> {
        (self.refresh_ms > 0).then(|| Duration::from_millis(self.refresh_ms))
    }
}
