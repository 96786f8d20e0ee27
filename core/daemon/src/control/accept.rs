//! Accepts connections, as many as there are places for, and serves each in a task.

use super::answer::{Code, error};
use super::connection::{Connection, Listener};
use super::journal::Kind;
use super::{Plane, admin, registration};
use crate::peer::Peer;
use crate::quota::{self, QuotaExceeded, QuotaPlace, User};
use rustix::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;
use tally_contract::limits::{ADMIN_CONNECTIONS_MAX, ADMIN_CONNECTIONS_USER_MAX};
use tally_ipc::wire::{self, Welcome};
use tokio::net::UnixStream;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPoint {
    Clients,
    Admin,
}

/// Accept connections until the task is dropped.
pub async fn accept(plane: Rc<Plane>, listener: Listener, entry_point: EntryPoint) {
    loop {
        while plane.places.turned_away.get() >= plane.room.turned_away {
            if plane.journal.may(Kind::Descriptors) {
                tracing::error!(
                    ?entry_point,
                    "too many connections that were refused cannot be closed"
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        match listener.accept().await {
            Ok(stream) => receive(&plane, stream, entry_point),
            Err(error) => {
                if plane.journal.may(Kind::Connections) {
                    tracing::error!("no connection can be accepted: {error}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serve a connection if there is a place for it.
fn receive(plane: &Rc<Plane>, stream: UnixStream, entry_point: EntryPoint) {
    let Ok(peer) = Peer::of(stream.as_fd()) else {
        drop(Connection::new(stream, plane.helpers.of(User::Containers, false)));
        return;
    };
    let (user, connection) = (plane.user(&peer), Connection::new(stream, plane.helper(&peer)));
    let place = match entry_point {
        EntryPoint::Clients => {
            let is_trusted = plane.is_trusted(&peer);
            let (most, may_use_reserved) =
                quota::unregistered_of_user(&plane.room, user, is_trusted);
            QuotaPlace::take(&plane.places.unregistered, user, most, may_use_reserved)
        }
        EntryPoint::Admin => {
            let is_admin = plane.may_change(&peer);
            let most =
                if is_admin { ADMIN_CONNECTIONS_MAX / 2 } else { ADMIN_CONNECTIONS_USER_MAX };
            QuotaPlace::take(&plane.places.admins, user, most, is_admin)
        }
    };
    let place = match place {
        Ok(place) => place,
        Err(full) => return turn_away(plane, connection, entry_point, &peer, full),
    };
    let plane = plane.clone();
    tokio::task::spawn_local(async move {
        let place = match entry_point {
            EntryPoint::Clients => registration::serve(&plane, place, &connection, peer).await,
            EntryPoint::Admin => {
                admin::serve(plane, &connection, peer).await;
                place
            }
        };
        // What cannot be closed stays in its user's quota.
        connection.end().await;
        drop(place);
    });
}

/// Say why, without waiting: a connection just made has room for it.
fn turn_away(
    plane: &Rc<Plane>,
    connection: Connection,
    entry_point: EntryPoint,
    peer: &Peer,
    full: QuotaExceeded,
) {
    let (uid, pid) = (peer.uid, peer.pid);
    let why = match full {
        QuotaExceeded::User(has) => {
            let user = plane.user(peer);
            format!("{user} has {has} connections that wait to be served: try again later")
        }
        QuotaExceeded::All(_) => "too many connections wait to be served: try again later".into(),
    };
    if plane.journal.may(Kind::Connections) {
        tracing::warn!(uid, pid, ?entry_point, "a connection was closed: {why}");
    }
    match entry_point {
        EntryPoint::Clients => {
            drop(wire::answer(connection.as_fd(), &Welcome::encode_refusal(&why), &[]))
        }
        EntryPoint::Admin => {
            let answer = format!("{}\n", error(Code::Unavailable, why));
            let _ = connection.try_write(answer.as_bytes());
        }
    }
    if !connection.is_open() {
        return;
    }
    let turned_away = plane.places.turned_away.get();
    plane.places.turned_away.set(turned_away + 1);
    let plane = plane.clone();
    tokio::task::spawn_local(async move {
        connection.end().await;
        plane.places.turned_away.set(plane.places.turned_away.get() - 1);
    });
}
