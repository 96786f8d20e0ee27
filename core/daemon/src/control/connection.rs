//! Sockets of peers. Only a helper thread closes them: with them go the descriptors that a peer sent and nobody
//! received, and closing those may take as long as it likes ([`crate::helpers`]).

use crate::helpers::Helper;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::Shutdown;
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
}

impl Connection {
    pub fn new(stream: UnixStream, helper: Helper) -> Self {
        // Urgent bytes may carry descriptors, too: in line they are seen by `peek`.
        let _ = rustix::net::sockopt::set_socket_oobinline(&stream, true);
        Connection { stream: Some(Arc::new(stream)), helper }
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
            self.helper.closed(stream).await;
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
            self.helper.close(stream);
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
    /// The system call's.
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
