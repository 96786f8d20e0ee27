//! A high-priority client's units of work.

use super::super::Engine;
use super::super::share::Share;
use super::DispatchClient;
use tally_engine::Action;

impl DispatchClient {
    /// Tell the engine of units that began and ended, of as many as its user may have in this pass. True if there are
    /// more.
    pub(super) fn poll_units(
        &mut self,
        now_ns: u64,
        share: Share,
        engine: &mut Engine,
        out: &mut Vec<Action>,
    ) -> bool {
        let (Some(service), Some(marks)) = (&mut self.service, &mut self.marks) else {
            return false;
        };
        let (link, id) = (&self.link, self.link.info.id);
        let marks_read = &link.core.marks_read;
        let taken = marks.read(now_ns, &link.region.marks, marks_read, share.marks);
        link.kernels.pass.used(Share { marks: taken, ..Share::default() });
        // Before the end of their unit.
        marks.tell_tokens(id, engine);
        marks.tell_profile(id, engine);
        service.look(now_ns, marks).tell(now_ns, id, engine, out);
        marks.has_more()
    }

    /// The longest time that keeps its objective for requests now, ns, if it has one.
    pub fn slo_ns(&self) -> Option<u64> {
        Some(self.service.as_ref()?.objective()?.slo_ns)
    }

    /// Whether it marked more than the last pass took.
    pub fn has_more_units(&self) -> bool {
        self.marks.as_ref().is_some_and(|marks| marks.has_more())
    }
}
