//! The policies that `tallyctl sim` can judge.

use super::SimArgs;
use crate::error::CtlError;
use std::path::Path;
use tally_engine::BuiltInRule;
use tally_engine::policy::Policy;

/// Silence that the built-in rule waits for, as in the core.
const IDLE_GAP_NS: u64 = 100_000;

/// What the name of a policy of this repository, compiled natively, begins with.
const NATIVE: &str = "native:";

/// What it takes to make instances of the policy.
pub struct Policies {
    pub name: String,
    config: String,
    #[cfg(feature = "wasm")]
    host: Option<tally_wasm_host::PolicyHost>,
}

impl Policies {
    pub fn open(name: &str, args: &SimArgs) -> Result<Self, CtlError> {
        let native = ["built-in", "none"].contains(&name);
        let config = match &args.policy_config {
            Some(path) if native => {
                let why = format!("--policy-config {}: {name} has none", path.display());
                return Err(CtlError::Usage(why));
            }
            Some(path) => std::fs::read_to_string(path).map_err(|e| {
                CtlError::Failed(format!("--policy-config {}: {e}", path.display()))
            })?,
            None => String::new(),
        };
        Ok(Policies {
            name: name.into(),
            config,
            #[cfg(feature = "wasm")]
            host: if native || name.starts_with(NATIVE) { None } else { Some(wasm_host(args)?) },
        })
    }

    /// A policy as if just loaded; `None`: no scheduling.
    pub fn load(&self) -> Result<Option<Box<dyn Policy + Send>>, CtlError> {
        match self.name.as_str() {
            "none" => Ok(None),
            "built-in" => Ok(Some(Box::new(BuiltInRule { idle_ns: IDLE_GAP_NS }))),
            name => match name.strip_prefix(NATIVE) {
                Some(native) => tally_native_policy::by_name(native, &self.config)
                    .map(Some)
                    .map_err(|why| CtlError::Usage(format!("--policy {name}: {why}"))),
                None => self.load_wasm(name).map(Some),
            },
        }
    }

    #[cfg(feature = "wasm")]
    fn load_wasm(&self, file: &str) -> Result<Box<dyn Policy + Send>, CtlError> {
        let Some(host) = &self.host else { return Err(CtlError::Usage("no host".into())) };
        if !Path::new(file).exists() && tally_native_policy::by_name(file, "").is_ok() {
            return Err(CtlError::Usage(format!(
                "--policy {file}: there is no such file; expected that of a component, or {NATIVE}{file}"
            )));
        }
        let loaded = host.load_file(Path::new(file), &self.config);
        let policy = loaded.map_err(|e| CtlError::Failed(format!("--policy: {e}")))?;
        Ok(Box::new(policy))
    }

    #[cfg(not(feature = "wasm"))]
    fn load_wasm(&self, file: &str) -> Result<Box<dyn Policy + Send>, CtlError> {
        Err(CtlError::Usage(format!(
            "--policy {file}: this tallyctl was built without WebAssembly (feature `wasm`); expected built-in, native:NAME or none"
        )))
    }
}

/// Bounds as in the core, but for CPU time: how fast this machine is must not change
/// what comes out. Fuel ends what loops.
#[cfg(feature = "wasm")]
fn wasm_host(args: &SimArgs) -> Result<tally_wasm_host::PolicyHost, CtlError> {
    let mut limits = args.limits.limits();
    limits.call_cpu_ms_max = limits.init_cpu_ms_max;
    let granted = args.grants.iter().map(|name| name.parse::<tally_wasm_host::Capability>());
    let granted = granted
        .collect::<Result<_, _>>()
        .map_err(|why| CtlError::Usage(format!("--grant: {why}")))?;
    tally_wasm_host::PolicyHost::new(limits)
        .map(|host| host.granting(granted))
        .map_err(|e| CtlError::Failed(e.to_string()))
}
