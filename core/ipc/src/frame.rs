//! Frames on a Unix socket: `magic, version, length, payload`, with descriptors. The version is checked before anything
//! else is read, so that two releases can at least name their mismatch.

use crate::PROTOCOL_VERSION;
use crate::wire::WireError;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// First bytes of every frame.
pub const FRAME_MAGIC: [u8; 8] = *b"TALLYIPC";
/// Most bytes of a payload; a frame with a longer one is refused.
pub const FRAME_BYTES_MAX: usize = 16 * 1024;
/// Most descriptors that come with a message; further ones are closed.
pub const DESCRIPTORS_MAX: usize = 8;
/// Bytes of a frame before its payload.
const HEADER: usize = 16;
/// Longest that a sender waits until the other side takes descriptors.
pub const ALLOWED_MAX: Duration = Duration::from_secs(1);
/// Pauses between its attempts: from, to.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(2)];

/// Wrap a payload into a frame.
pub fn frame(payload: &[u8]) -> Vec<u8> {
    let mut bytes = FRAME_MAGIC.to_vec();
    bytes.extend(PROTOCOL_VERSION.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// Send a frame with at most [`DESCRIPTORS_MAX`] descriptors in one message. If the other side answers or ends before
/// it takes descriptors, nothing is sent: what it says is there to be received.
///
/// # Errors
/// The error of the system call that failed; [`rustix::io::Errno::TIMEDOUT`] if no descriptor was taken for
/// [`ALLOWED_MAX`]. A frame is far below a socket buffer, so a short write means a broken peer and is reported as
/// [`WireError::Closed`].
pub fn send(
    socket: BorrowedFd<'_>,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    let bytes = frame(payload);
    match send_when_allowed(socket, &bytes, fds, ALLOWED_MAX) {
        Ok(Some(sent)) if sent < bytes.len() => Err(WireError::Closed),
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::PERM) => Err(rustix::io::Errno::TIMEDOUT.into()),
        Err(error) => Err(error.into()),
    }
}

/// The core's side: as [`send`], without waiting for a peer that takes no descriptors.
///
/// # Errors
/// The error of the system call that failed; [`WireError::Closed`] if not all was taken.
pub fn answer(
    socket: BorrowedFd<'_>,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    let bytes = frame(payload);
    let sent = send_message(socket, &bytes, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    if sent == bytes.len() { Ok(()) } else { Err(WireError::Closed) }
}

/// One message; how many of its bytes were taken. A core takes no descriptors ([`crate::rights`]) until it has accepted
/// the connection and found its user's earlier ones closed: wait for that. `None`: it answered or ended before.
pub(crate) fn send_when_allowed(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    most: Duration,
) -> rustix::io::Result<Option<usize>> {
    let (start, mut pause) = (Instant::now(), PAUSES[0]);
    loop {
        match send_message(socket, bytes, fds, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::PERM) if !fds.is_empty() && start.elapsed() < most => {}
            sent => return sent.map(Some),
        }
        // By calls that programs which filter theirs have made before.
        crate::wait::nap(pause);
        match peek(socket, &mut [0; 1]) {
            Err(rustix::io::Errno::AGAIN) => pause = (pause * 2).min(PAUSES[1]),
            Ok(_) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// One message with descriptors; how many of its bytes were taken.
pub(crate) fn send_message(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(rustix::io::Errno::TOOBIG);
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
    })
}

/// What has come at a socket and is not received yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peeked {
    /// How many of the bytes asked for are there; 0 at the end.
    pub bytes: usize,
    pub has_descriptors: bool,
}

/// Look at what has come, without waiting and without taking it. To close a descriptor that a peer sent may take as
/// long as the peer likes, and the kernel closes those that a receiver leaves out: a thread that must not wait for
/// peers receives only what comes without descriptors, and no more bytes than it looked at.
///
/// The socket needs `SO_OOBINLINE`: urgent bytes, which may carry descriptors, are not seen otherwise.
///
/// # Errors
/// The error of the system call that failed; [`rustix::io::Errno::AGAIN`] if nothing has come.
pub fn peek(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<Peeked> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::io::retry_on_intr(|| {
        // Without room for descriptors the kernel makes none here, and says that there are some.
        let mut none = RecvAncillaryBuffer::default();
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut none, flags)
    })?;
    Ok(Peeked { bytes: got.bytes, has_descriptors: got.flags.contains(ReturnFlags::CTRUNC) })
}

/// One message into `bytes`; what `keep` makes of its descriptors is added to `fds`, at most `fds_max` in all: surplus
/// ones are closed, a peer must not fill our table.
pub(crate) fn receive_message<F>(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    (fds, fds_max): (&mut Vec<F>, usize),
    flags: RecvFlags,
    keep: impl FnMut(OwnedFd) -> F,
) -> rustix::io::Result<usize> {
    let mut keep = keep;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            let room = fds_max.saturating_sub(fds.len());
            fds.extend(received.take(room).map(&mut keep));
        }
    }
    Ok(received.bytes)
}

/// A payload and its descriptors.
pub type Frame<F = OwnedFd> = (Vec<u8>, Vec<F>);

/// Receives one frame, a message at a time. `F`: what is kept of a descriptor.
#[derive(Debug)]
pub struct Receiver<F = OwnedFd> {
    bytes: Vec<u8>,
    have: usize,
    fds: Vec<F>,
    fds_max: usize,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::taking(DESCRIPTORS_MAX)
    }
}

impl<F> Receiver<F> {
    /// Of a peer that is to send at most so many descriptors; surplus ones are closed.
    pub fn taking(fds_max: usize) -> Self {
        Receiver { bytes: Vec::new(), have: 0, fds: Vec::new(), fds_max }
    }

    /// Bytes from the frame's start to the next that is to be known.
    fn wanted(&self) -> Result<usize, WireError> {
        Ok(if self.have < HEADER { HEADER } else { HEADER + payload_length(&self.bytes)? })
    }

    /// What the next step would take ([`peek`]).
    ///
    /// # Errors
    /// What is wrong with the frame, or the system call's.
    pub fn peek(&self, socket: BorrowedFd<'_>) -> Result<Peeked, WireError> {
        let mut bytes = vec![0; self.wanted()? - self.have];
        let peeked = peek(socket, &mut bytes)?;
        if peeked.bytes == 0 { Err(WireError::Closed) } else { Ok(peeked) }
    }

    /// Take what has come, at most so many bytes. `None`: the frame is not complete.
    ///
    /// # Errors
    /// What is wrong with the frame, or the system call's error ([`rustix::io::Errno::AGAIN`] if nothing has come and
    /// the socket or `flags` say not to wait).
    pub fn step(
        &mut self,
        socket: BorrowedFd<'_>,
        flags: RecvFlags,
        bytes_max: usize,
        keep: impl FnMut(OwnedFd) -> F,
    ) -> Result<Option<Frame<F>>, WireError> {
        let wanted = self.wanted()?;
        if self.have < wanted {
            self.bytes.resize(wanted, 0);
            let to = wanted.min(self.have.saturating_add(bytes_max));
            let fds = (&mut self.fds, self.fds_max);
            let got = receive_message(socket, &mut self.bytes[self.have..to], fds, flags, keep)?;
            if got == 0 {
                return Err(WireError::Closed);
            }
            self.have += got;
        }
        if self.have < HEADER || self.have < HEADER + payload_length(&self.bytes)? {
            return Ok(None);
        }
        self.bytes.drain(..HEADER);
        Ok(Some((std::mem::take(&mut self.bytes), std::mem::take(&mut self.fds))))
    }
}

/// Receive one frame and its descriptors. Set a receive timeout on the socket
/// first: a peer may send half a frame and stop.
///
/// # Errors
/// What is wrong with the frame, or the system call's error.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Frame, WireError> {
    let mut receiver = Receiver::default();
    loop {
        if let Some(frame) = receiver.step(socket, RecvFlags::empty(), usize::MAX, |fd| fd)? {
            return Ok(frame);
        }
    }
}

fn payload_length(header: &[u8]) -> Result<usize, WireError> {
    if header[..8] != FRAME_MAGIC {
        return Err(WireError::NotAFrame);
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
    if word(8) != PROTOCOL_VERSION {
        return Err(WireError::Version { found: word(8) });
    }
    let length = word(12) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(WireError::Malformed("the frame is too long"));
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Hello;
    use rustix::fd::AsFd;
    use std::os::unix::net::UnixStream;

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
    fn frames_and_descriptors_cross_a_socket() {
        let (a, b) = UnixStream::pair().unwrap();
        let (fd, region) = crate::map::create_client().unwrap();
        send(a.as_fd(), &hello().encode(), &[fd.as_fd()]).unwrap();
        let (payload, fds) = receive(b.as_fd()).unwrap();
        assert_eq!(Hello::decode(&payload).unwrap(), hello());
        region.kernel_count.store(3, std::sync::atomic::Ordering::SeqCst);
        let seen = crate::map::open_client(fds[0].as_fd()).unwrap();
        assert_eq!(seen.kernel_count.load(std::sync::atomic::Ordering::SeqCst), 3);
    }

    #[test]
    fn another_version_is_named() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut bytes = frame(&hello().encode());
        bytes[8] = 99;
        std::io::Write::write_all(&mut &a, &bytes).unwrap();
        let error = receive(b.as_fd()).unwrap_err();
        assert!(error.to_string().contains("version 99"), "{error}");
    }

    #[test]
    fn a_closed_peer_and_foreign_bytes_are_told_apart() {
        let (a, b) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut &a, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(matches!(receive(b.as_fd()), Err(WireError::NotAFrame)));
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert!(matches!(receive(b.as_fd()), Err(WireError::Closed)));
    }

    #[test]
    fn a_frame_may_come_byte_by_byte() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut receiver = Receiver::default();
        let bytes = frame(&hello().encode());
        let mut step = || receiver.step(b.as_fd(), RecvFlags::DONTWAIT, usize::MAX, |fd| fd);
        for byte in &bytes[..bytes.len() - 1] {
            std::io::Write::write_all(&mut &a, &[*byte]).unwrap();
            assert!(step().unwrap().is_none());
        }
        let nothing = step().unwrap_err();
        assert!(matches!(nothing, WireError::Os(rustix::io::Errno::AGAIN)), "{nothing}");
        std::io::Write::write_all(&mut &a, &bytes[bytes.len() - 1..]).unwrap();
        let (payload, _) = step().unwrap().unwrap();
        assert_eq!(Hello::decode(&payload).unwrap(), hello());
    }

    #[test]
    fn a_sender_waits_until_descriptors_are_taken_and_hears_a_refusal_before() {
        let (a, b) = UnixStream::pair().unwrap();
        if crate::rights::allow(b.as_fd(), false) == Err(rustix::io::Errno::NOPROTOOPT) {
            // Before Linux 6.16 every socket takes them.
            return send(a.as_fd(), &hello().encode(), &[a.as_fd()]).unwrap();
        }
        let fds = [a.as_fd()];
        let soon = Duration::from_millis(20);
        let refused = send_when_allowed(a.as_fd(), b"x", &fds, soon);
        assert_eq!(refused, Err(rustix::io::Errno::PERM));
        for flags in [SendFlags::empty(), SendFlags::OOB] {
            let urgent = send_message(a.as_fd(), b"x", &fds, flags);
            assert_eq!(urgent, Err(rustix::io::Errno::PERM), "{flags:?}");
        }
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| send(a.as_fd(), &hello().encode(), &fds));
            std::thread::sleep(soon);
            crate::rights::allow(b.as_fd(), true).unwrap();
            sending.join().unwrap().unwrap();
        });
        assert_eq!(receive(b.as_fd()).unwrap().1.len(), 1);
        crate::rights::allow(b.as_fd(), false).unwrap();
        send(b.as_fd(), b"no", &[]).unwrap();
        send(a.as_fd(), &hello().encode(), &fds).unwrap();
        assert_eq!(receive(a.as_fd()).unwrap().0, b"no");
        assert_eq!(peek(b.as_fd(), &mut [0; 1]), Err(rustix::io::Errno::AGAIN), "nothing was sent");
    }

    #[test]
    fn descriptors_are_seen_before_they_are_received() {
        let (a, b) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_oobinline(&b, true).unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let (here, there) = rustix::pipe::pipe().unwrap();
        let look = || peek(b.as_fd(), &mut [0; 64]);
        assert_eq!(look(), Err(rustix::io::Errno::AGAIN));
        for (flags, pieces) in [(SendFlags::empty(), ["a", "b"]), (SendFlags::OOB, ["a", "b"])] {
            send_message(a.as_fd(), pieces[0].as_bytes(), &[], SendFlags::empty()).unwrap();
            assert_eq!(look(), Ok(Peeked { bytes: 1, has_descriptors: false }));
            send_message(a.as_fd(), pieces[1].as_bytes(), &[there.as_fd()], flags).unwrap();
            // Urgent bytes are a message of their own.
            let mut fds = Vec::new();
            let mut taken = 0;
            while taken < 2 {
                let before = open();
                let seen = look().unwrap();
                assert_eq!(open(), before, "looking makes no descriptor");
                let mut bytes = vec![0; seen.bytes];
                let had = fds.len();
                let room = (&mut fds, 8);
                taken += receive_message(b.as_fd(), &mut bytes, room, RecvFlags::DONTWAIT, |fd| fd)
                    .unwrap();
                assert_eq!(fds.len() > had, seen.has_descriptors);
            }
            assert_eq!((fds.len(), look()), (1, Err(rustix::io::Errno::AGAIN)));
        }
        drop((a, here));
        assert_eq!(look(), Ok(Peeked { bytes: 0, has_descriptors: false }));
    }
}
