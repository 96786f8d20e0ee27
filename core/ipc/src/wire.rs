//! Registration over the core's Unix socket.
//!
//! The client connects and sends [`Hello`] with its region's memfd; the core
//! checks the peer's credentials, decides its class and answers [`Welcome`] with
//! two descriptors: the core region and the doorbell (client wakes core). Then the
//! socket stays open and silent: its end is how each side learns that the other is
//! gone.
//!
//! Encoded by hand, not by serde: the shim decodes it in every client's process, in little code and with each text
//! bounded before it is copied.
//!
//! Frames: [`crate::frame`]. This socket answers nothing else; admin requests have one of their own ([`crate::admin`]),
//! in another folder.

use crate::PROTOCOL_VERSION;
pub use crate::frame::{FRAME_BYTES_MAX, Receiver, answer, frame, receive, send};
use std::path::{Path, PathBuf};
use tally_contract::limits::{CLIENT_TEXT_BYTES_MAX, LABELS_MAX, RESERVES_MAX};

/// Longest text of a [`Notice`], bytes.
pub const NOTICE_BYTES_MAX: usize = 512;
/// Tells a client where the core is.
pub const ENV_SOCKET: &str = "TALLY_SOCKET";
/// Tells `tallyctl` where the core takes admin requests.
pub const ENV_ADMIN_SOCKET: &str = "TALLY_ADMIN_SOCKET";
/// `high` or `best-effort`: what the client asks to be.
pub const ENV_PRIORITY: &str = "TALLY_PRIORITY";
/// What the client is called in status and logs.
pub const ENV_NAME: &str = "TALLY_NAME";
/// Labels, `k=v` separated by `\x1f`.
pub const ENV_LABELS: &str = "TALLY_LABELS";
/// Objective of a high-priority program, as `20ms`: becomes the label of that name, as does the share of requests, %.
pub const ENV_SLO: &str = "TALLY_SLO";
pub const ENV_SLO_PERCENTILE: &str = "TALLY_SLO_PERCENTILE";
pub const ENV_TPOT: &str = "TALLY_TPOT";
/// Weight of a best-effort program among others.
pub const ENV_WEIGHT: &str = "TALLY_WEIGHT";
/// Least share of the GPU that a best-effort program asks for, as `20%`: becomes the label of that name.
pub const ENV_MIN_SHARE: &str = "TALLY_MIN_SHARE";
/// `open` (run unscheduled, the default) or `hold`: what a client does while
/// there is no core.
pub const ENV_FAIL: &str = "TALLY_FAIL";
/// A file for the shim's own log; nothing is logged without it.
pub const ENV_SHIM_LOG: &str = "TALLY_SHIM_LOG";

/// Where clients register when nothing else is said, below the runtime directory. The folder is what a container gets.
pub const SOCKET_NAME: &str = "tally/clients/core.sock";
/// The folder of sockets for clients, in which the admin socket never is.
pub const CLIENTS_FOLDER: &str = "clients";
/// The folder beside it, with the admin socket.
pub const ADMIN_FOLDER: &str = "admin";

/// The default socket: `$XDG_RUNTIME_DIR/tally/clients/core.sock`, else `/run/tally/clients/core.sock` for root, else
/// `$HOME/.local/state/tally/clients/core.sock`, or `/run/user/UID/tally/clients/core.sock` without `HOME`. Nobody else
/// can make those folders.
pub fn default_socket() -> PathBuf {
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        return Path::new(&dir).join(SOCKET_NAME);
    }
    let uid = rustix::process::getuid();
    if uid.is_root() {
        return Path::new("/run").join(SOCKET_NAME);
    }
    match std::env::var_os("HOME").filter(|d| !d.is_empty()) {
        Some(home) => Path::new(&home).join(".local/state").join(SOCKET_NAME),
        None => PathBuf::from(format!("/run/user/{}", uid.as_raw())).join(SOCKET_NAME),
    }
}

/// The admin socket of the core whose clients register at `socket`, unless another is named: of `X/clients/NAME` it is
/// `X/admin/NAME`. `None` for a socket whose folder has another name: what would be beside it is anybody's guess.
pub fn admin_socket_of(socket: &Path) -> Option<PathBuf> {
    let folder = socket.parent().filter(|folder| folder.ends_with(CLIENTS_FOLDER))?;
    Some(folder.with_file_name(ADMIN_FOLDER).join(socket.file_name()?))
}

/// Why a message could not be sent, received or understood.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("registration socket: {0}")]
    Os(#[from] rustix::io::Errno),
    /// The peer closed the socket.
    #[error("the peer closed the registration socket")]
    Closed,
    /// Not a frame of this protocol.
    #[error("not a Tally registration frame")]
    NotAFrame,
    /// The peer speaks another version.
    #[error(
        "peer speaks protocol version {found}, this side {PROTOCOL_VERSION}: install shim and core of one release"
    )]
    Version { found: u32 },
    /// A field is missing, too long or out of range.
    #[error("malformed registration: {0}")]
    Malformed(&'static str),
    /// The core refused, and says why.
    #[error("refused by the core: {0}")]
    Refused(String),
}

/// What a client asks to be registered as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub high_priority: bool,
    /// Its name; the program's when not given.
    pub name: String,
    pub labels: Vec<(String, String)>,
    /// Tickets below this are settled; the core starts reading here.
    pub first_ticket: u64,
    /// `cuInit` has run already (a re-attach): what must be set before it,
    /// such as the MPS directory, comes too late.
    pub initialised: bool,
}

/// What the core made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    pub client_id: u32,
    /// Whether it is high priority.
    pub high_priority: bool,
    /// Why it is not what it asked to be; empty otherwise.
    pub class_reason: String,
    /// How it shares the GPU.
    pub sharing: SharingMode,
    /// How long a waiting thread spins before it sleeps, ns.
    pub spin_ns: u64,
    /// What to do when the core goes away: hold launches instead of running
    /// them unscheduled.
    pub fail_hold: bool,
    /// Some units of work of a high-priority client are profiled.
    pub profiles_units: bool,
    /// How the client may transform its kernels.
    pub rewrite: RewriteSettings,
}

/// What a client may do to its kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RewriteSettings {
    /// Make transformed forms of kernels.
    pub enabled: bool,
    /// Also make forms of kernels of NVIDIA's closed libraries.
    pub vendor_libraries: bool,
    /// A launch asked to yield that has not after so long, ms, is helped to its
    /// end and never transformed again.
    pub rescue_ms: u32,
    /// Keep transformed forms on disk, up to so many MiB in all. 0: none.
    pub cache_mib: u32,
    /// Keep so many SMs free: one green context each is made. Empty: none.
    pub reserve_sms: Vec<u32>,
    /// Streams wait for their SM-limited launches only once something else could see those.
    pub puts_off_joins: bool,
}

/// First byte of a payload that is a [`Notice`]; that of a [`Hello`] is 0 or 1.
pub const NOTICE: u8 = 2;

/// A payload of this byte alone asks whether the core serves; it is answered with the same.
pub const PING: u8 = 3;
/// Behind [`PING`]: would this user be high priority? The answer carries, behind its own, why not; nothing: it would.
pub const PING_HIGH: u8 = 1;

/// Sent in place of a [`Hello`], without descriptors and without an answer: the core does not govern this
/// process, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub name: String,
    /// Why, to be shown to people.
    pub reason: String,
}

/// How a client shares the GPU with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharingMode {
    /// Contexts take turns; set this hardware time slice.
    TimeSlice {
        /// Microseconds; 0 leaves the driver's.
        slice_us: u64,
        /// The same while more than one best-effort client is connected.
        shared_us: u64,
        /// How long the GPU stays with this client once its work is done, us, at most
        /// `LINGER_US_MAX`; 0: not at all.
        linger_us: u32,
    },
    /// All run at once through MPS.
    Mps {
        /// `CUDA_MPS_PIPE_DIRECTORY` to set before `cuInit`; empty leaves it.
        pipe_directory: String,
        /// `CUDA_MPS_CLIENT_PRIORITY` to set (0 normal, 1 below normal).
        client_priority: u32,
        /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` to set; 100 leaves it.
        thread_percent: u32,
    },
    /// Neither applies (no NVIDIA GPU: the software device).
    Unmanaged,
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u32(&mut self, v: u32) {
        self.0.extend(v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.0.extend(v.to_le_bytes());
    }
    fn text(&mut self, s: &str) {
        self.text_within(s, CLIENT_TEXT_BYTES_MAX);
    }
    fn text_within(&mut self, s: &str, most: usize) {
        let mut end = s.len().min(most);
        while !s.is_char_boundary(end) {
            end -= 1;
        }
        self.u32(end as u32);
        self.0.extend(&s.as_bytes()[..end]);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], WireError> {
        let (head, tail) =
            self.0.split_at_checked(n).ok_or(WireError::Malformed("it ends too early"))?;
        self.0 = tail;
        Ok(head)
    }
    fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.take(1)?[0])
    }
    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("4 bytes")))
    }
    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }
    fn flag(&mut self) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(WireError::Malformed("a flag is neither 0 nor 1")),
        }
    }
    fn text(&mut self) -> Result<String, WireError> {
        let n = self.u32()? as usize;
        if n > CLIENT_TEXT_BYTES_MAX {
            return Err(WireError::Malformed("a text is too long"));
        }
        String::from_utf8(self.take(n)?.to_vec())
            .map_err(|_| WireError::Malformed("a text is not UTF-8"))
    }
}

impl Hello {
    /// As a payload. Over-long texts are transformed, surplus labels dropped.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        w.u8(self.high_priority.into());
        w.text(&self.name);
        w.u32(self.labels.len().min(LABELS_MAX) as u32);
        for (k, v) in self.labels.iter().take(LABELS_MAX) {
            w.text(k);
            w.text(v);
        }
        w.u64(self.first_ticket);
        w.u8(self.initialised.into());
        w.0
    }

    /// From a payload.
    ///
    /// # Errors
    /// Which rule it breaks.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(payload);
        let high_priority = r.flag()?;
        let name = r.text()?;
        let n = r.u32()? as usize;
        if n > LABELS_MAX {
            return Err(WireError::Malformed("too many labels"));
        }
        let labels =
            (0..n).map(|_| Ok((r.text()?, r.text()?))).collect::<Result<_, WireError>>()?;
        let first_ticket = r.u64()?;
        if first_ticket > u64::MAX / 2 {
            return Err(WireError::Malformed("the first ticket is out of range"));
        }
        Ok(Hello { high_priority, name, labels, first_ticket, initialised: r.flag()? })
    }
}

impl Notice {
    /// As a payload. Over-long texts are transformed.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(vec![NOTICE]);
        w.text_within(&self.name, NOTICE_BYTES_MAX);
        w.text_within(&self.reason, NOTICE_BYTES_MAX);
        w.0
    }

    /// From a payload. What is not UTF-8 is replaced: paths need not be.
    ///
    /// # Errors
    /// Which rule it breaks.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(payload);
        if r.u8()? != NOTICE {
            return Err(WireError::Malformed("it is not a notice"));
        }
        let mut text = || {
            let n = r.u32()? as usize;
            if n > NOTICE_BYTES_MAX {
                return Err(WireError::Malformed("a text is too long"));
            }
            Ok(String::from_utf8_lossy(r.take(n)?).into_owned())
        };
        Ok(Notice { name: text()?, reason: text()? })
    }
}

impl Welcome {
    /// The payload of the core's answer; [`decode`](Self::decode) reads it back.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(vec![1]);
        w.u32(self.client_id);
        w.u8(self.high_priority.into());
        w.text(&self.class_reason);
        match &self.sharing {
            SharingMode::Unmanaged => w.u8(0),
            SharingMode::TimeSlice { slice_us, shared_us, linger_us } => {
                w.u8(1);
                w.u64(*slice_us);
                w.u64(*shared_us);
                w.u32(*linger_us);
            }
            SharingMode::Mps { pipe_directory, client_priority, thread_percent } => {
                w.u8(2);
                w.text(pipe_directory);
                w.u32(*client_priority);
                w.u32(*thread_percent);
            }
        }
        w.u64(self.spin_ns);
        w.u8(self.fail_hold.into());
        w.u8(self.profiles_units.into());
        let RewriteSettings {
            enabled,
            vendor_libraries,
            rescue_ms,
            cache_mib,
            reserve_sms,
            puts_off_joins,
        } = &self.rewrite;
        w.u8((*enabled).into());
        w.u8((*vendor_libraries).into());
        w.u32(*rescue_ms);
        w.u32(*cache_mib);
        w.u32(reserve_sms.len().min(RESERVES_MAX) as u32);
        for sms in reserve_sms.iter().take(RESERVES_MAX) {
            w.u32(*sms);
        }
        w.u8((*puts_off_joins).into());
        w.0
    }

    /// A refusal as a payload.
    pub fn encode_refusal(why: &str) -> Vec<u8> {
        let mut w = Writer(vec![0]);
        w.text(why);
        w.0
    }

    /// From a payload; a refusal comes back as [`WireError::Refused`].
    ///
    /// # Errors
    /// Which rule it breaks, or the refusal.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(payload);
        if !r.flag()? {
            return Err(WireError::Refused(r.text()?));
        }
        Ok(Welcome {
            client_id: r.u32()?,
            high_priority: r.flag()?,
            class_reason: r.text()?,
            sharing: match r.u8()? {
                0 => SharingMode::Unmanaged,
                1 => SharingMode::TimeSlice {
                    slice_us: r.u64()?,
                    shared_us: r.u64()?,
                    linger_us: r.u32()?,
                },
                2 => SharingMode::Mps {
                    pipe_directory: r.text()?,
                    client_priority: r.u32()?,
                    thread_percent: r.u32()?,
                },
                _ => return Err(WireError::Malformed("unknown sharing mode")),
            },
            spin_ns: r.u64()?,
            fail_hold: r.flag()?,
            profiles_units: r.flag()?,
            rewrite: RewriteSettings {
                enabled: r.flag()?,
                vendor_libraries: r.flag()?,
                rescue_ms: r.u32()?,
                cache_mib: r.u32()?,
                reserve_sms: {
                    let n = r.u32()? as usize;
                    if n > RESERVES_MAX {
                        return Err(WireError::Malformed(
                            "too many entries of `sm_limits.reserve_sms`",
                        ));
                    }
                    (0..n).map(|_| r.u32()).collect::<Result<_, _>>()?
                },
                puts_off_joins: r.flag()?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            high_priority: true,
            name: "server".into(),
            labels: vec![("team".into(), "a".into())],
            first_ticket: 12,
            initialised: false,
        }
    }

    #[test]
    fn the_admin_socket_is_in_a_folder_beside_the_clients() {
        let of = |path: &str| admin_socket_of(Path::new(path));
        assert_eq!(of("/run/tally/clients/core.sock"), Some("/run/tally/admin/core.sock".into()));
        assert_eq!(of("clients/gpu1"), Some("admin/gpu1".into()));
        for other in ["/run/core.sock", "core.sock", "/clients", "/x/myclients/s"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert!(admin_socket_of(&default_socket()).is_some());
    }

    #[test]
    fn notices_round_trip_and_long_ones_are_transformed() {
        let notice = Notice { name: "train".into(), reason: "no libgcc_s".into() };
        assert_eq!(Notice::decode(&notice.encode()).unwrap(), notice);
        let long = Notice { name: "n".into(), reason: "x".repeat(2 * NOTICE_BYTES_MAX) };
        assert_eq!(Notice::decode(&long.encode()).unwrap().reason.len(), NOTICE_BYTES_MAX);
        assert!(Notice::decode(&hello().encode()).is_err());
    }

    proptest! {
        #[test]
        fn welcome_round_trips(id: u32, high: bool, reason in ".{0,80}", slice: u64, spin: u64) {
            let w = Welcome {
                client_id: id, high_priority: high, class_reason: reason,
                sharing: SharingMode::TimeSlice { slice_us: slice, shared_us: spin, linger_us: id }, spin_ns: spin, fail_hold: !high, profiles_units: high,
                rewrite: RewriteSettings {
                    enabled: high, vendor_libraries: !high, rescue_ms: id, cache_mib: id / 2,
                    reserve_sms: vec![8, id], puts_off_joins: high,
                },
            };
            prop_assert_eq!(Welcome::decode(&w.encode()).unwrap(), w);
        }

        #[test]
        fn any_payload_is_decoded_or_refused(bytes: Vec<u8>) {
            let _ = Hello::decode(&bytes);
            let _ = Welcome::decode(&bytes);
            let _ = Notice::decode(&bytes);
        }
    }
}
