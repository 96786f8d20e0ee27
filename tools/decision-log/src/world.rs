//! The world as a policy saw it, rebuilt from records.

use crate::record::Record;
use tally_engine::policy::{Context, Event, World};

/// A record that does not fit what came before it.
#[derive(Debug, thiserror::Error)]
#[error("the log contradicts itself: {0}")]
pub struct Contradiction(String);

/// Take in what a record says of clients and kernels. A call's own change (a client that
/// joins) is there when the policy is called, as in the engine.
///
/// # Errors
/// If it does not fit.
pub fn apply(context: &mut Context, record: &Record) -> Result<(), Contradiction> {
    let world = &mut *context.world;
    match record {
        Record::Base(base) => {
            *world = World {
                sharing: base.sharing,
                reserve_sms: base.reserve_sms.clone(),
                ..World::default()
            };
        }
        Record::Begin { sm_count, .. } => world.sm_count = *sm_count,
        Record::Decide { launch, .. } => world.sm_count = launch.sm_count,
        Record::Kernel { id, key } => {
            let is_new = world.profiles.adopt_key(*id, key.clone()).then_some(());
            let why = || format!("kernel {id} ({}) is introduced twice", key.name);
            is_new.ok_or_else(|| Contradiction(why()))?;
        }
        Record::Profile { id, view } => {
            let adopted = world.profiles.adopt(*id, view).then_some(());
            let why = || format!("kernel {id} was not introduced");
            adopted.ok_or_else(|| Contradiction(why()))?;
        }
        Record::Client(info) | Record::Event { event: Event::Joined(info), .. } => {
            // A policy that takes over is told of clients that were there before.
            let view = world.clients.entry(info.id).or_insert_with(|| info.clone().into());
            if view.info.class != info.class {
                *view = info.clone().into();
            }
            view.info = info.clone();
        }
        Record::Usage { id, usage } => {
            let view = world.clients.get_mut(id);
            let why = || Contradiction(format!("client {id} is not connected"));
            view.ok_or_else(why)?.usage = *usage;
        }
        Record::Service { id, view } => {
            let client = world.clients.get_mut(id);
            let why = || Contradiction(format!("client {id} is not connected"));
            client.ok_or_else(why)?.service = Some(*view);
        }
        Record::Gone(id) | Record::Event { event: Event::Left(id), .. } => {
            world.clients.remove(id);
        }
        _ => {}
    }
    Ok(())
}
