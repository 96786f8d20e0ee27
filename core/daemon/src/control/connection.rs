//! Sockets of peers. With them go the descriptors that a peer sent and nobody received, and closing those may take as
//! long as it likes: only a helper thread closes a socket that may hold any ([`crate::helpers`]). A connection takes
//! none until it is told to ([`tally_ipc::rights`]); before Linux 6.16 every one does.

use crate::helpers::{Helper, HelperError};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use tokio::net::{UnixListener, UnixStream};

/// The other side is told at once: closing may wait.
fn shut_down(socket: impl AsFd) {
    // Fails if the peer is gone.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// A connection of a peer.
#[derive(Debug)]
pub struct Connection {
    /// `None` once the connection has ended.
    stream: Option<Arc<UnixStream>>,
    helper: Helper,
    /// Descriptors may have been sent to it.
    is_open: Cell<bool>,
}

impl Connection {
    pub fn new(stream: UnixStream, helper: Helper) -> Self {
        // Urgent bytes may carry descriptors, too: in line they are seen by `peek`.
        let _ = rustix::net::sockopt::set_socket_oobinline(&stream, true);
        let is_open = Cell::new(tally_ipc::rights::are_allowed(stream.as_fd()));
        Connection { stream: Some(Arc::new(stream)), helper, is_open }
    }

    /// Whether it may hold descriptors.
    pub fn is_open(&self) -> bool {
        self.is_open.get()
    }

    /// Take descriptors from now on.
    ///
    /// # Errors
    /// If its user's earlier ones are not closed.
    pub fn open(&self) -> Result<(), HelperError> {
        if self.is_open() {
            return Ok(());
        }
        self.helper.has_room()?;
        self.is_open.set(true);
        let _ = tally_ipc::rights::allow(self.as_fd(), true);
        Ok(())
    }

    /// Take none any more.
    pub fn bar(&self) {
        let barred = tally_ipc::rights::allow(self.as_fd(), false).is_ok();
        // What has come is there still.
        let is_empty = match tally_ipc::frame::peek(self.as_fd(), &mut [0; 1]) {
            Ok(peeked) => peeked.bytes == 0,
            Err(error) => error == Errno::AGAIN,
        };
        if barred && is_empty {
            self.is_open.set(false);
        }
    }

    /// A second reference to the stream, for a helper thread.
    pub fn shared(&self) -> Arc<UnixStream> {
        self.stream.clone().expect("taken only at its end")
    }

    pub fn helper(&self) -> &Helper {
        &self.helper
    }

    /// End it; returns when it is closed.
    pub async fn end(mut self) {
        if let Some(stream) = self.stream.take() {
            shut_down(&*stream);
            if self.is_open() {
                self.helper.closed(stream).await;
            }
        }
    }
}

impl Deref for Connection {
    type Target = UnixStream;
    fn deref(&self) -> &UnixStream {
        self.stream.as_ref().expect("taken only at its end")
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            shut_down(&*stream);
            if self.is_open() {
                self.helper.close(stream);
            }
        }
    }
}

/// A socket that takes connections: with it go those that wait to be accepted.
#[derive(Debug)]
pub struct Listener {
    listener: Option<UnixListener>,
    helper: Helper,
}

impl Listener {
    pub fn new(listener: UnixListener, helper: Helper) -> Self {
        Listener { listener: Some(listener), helper }
    }

    /// The next connection.
    ///
    /// # Errors
    /// The error of the system call that failed.
    pub async fn accept(&self) -> std::io::Result<UnixStream> {
        let listener = self.listener.as_ref().expect("taken only when it is dropped");
        Ok(listener.accept().await?.0)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.take() {
            shut_down(&listener);
            self.helper.close(listener);
        }
    }
}
