//! Figures of the machine and of the core that another machine, or another version, may
//! have otherwise; [`Model::set`] changes one. `docs/results-simulator.md` says where most are
//! from: measured, read from runs of pairs, fitted to pairs, or assumed.

use serde::Serialize;

/// Largest value of a figure.
pub const FIGURE_MAX: u64 = 10_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// Change of context away from one that has nothing running.
    pub change_idle_ns: u64,
    /// Change of context in the middle of a kernel, from the end of the slice.
    pub change_busy_ns: u64,
    /// Of that, while the old one still runs.
    pub stop_ns: u64,
    /// Under the core the GPU stays with the high-priority program for so long after its
    /// last kernel (`[sharing.timeslice] linger_us`).
    pub linger_ns: u64,
    /// A program whose thread went to sleep launches so long after it was granted.
    pub wake_ns: u64,
    /// A gated launch costs its program so much more.
    pub decided_ns: u64,
    /// From being told to yield until running blocks see it: threads wake up for it.
    pub flag_ns: u64,
    /// From one slice to the next: the gate, and the start of the launch behind it.
    pub slice_ns: u64,
    /// On the host, for each part of a launch but one: launch, gate, events around it.
    pub part_ns: u64,
    /// Slowdown of the training's own part beside another program, thousandths.
    pub hosts_permille: u64,
    /// SMs that the trainings find under MPS, percent (`[sharing.mps] best_effort_percent`).
    pub best_effort_percent: u64,
}

impl Default for Model {
    fn default() -> Self {
        Model {
            change_idle_ns: 137_000,
            change_busy_ns: 237_000,
            stop_ns: 30_000,
            linger_ns: 100_000,
            wake_ns: 50_000,
            decided_ns: 1_700,
            flag_ns: 60_000,
            slice_ns: 10_000,
            part_ns: 4_600,
            hosts_permille: 70,
            best_effort_percent: 100,
        }
    }
}

impl Model {
    /// Set one by its name.
    ///
    /// # Errors
    /// Which names there are, or how large a figure may be.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
        let all = [
            ("change_idle_ns", &mut self.change_idle_ns),
            ("change_busy_ns", &mut self.change_busy_ns),
            ("stop_ns", &mut self.stop_ns),
            ("linger_ns", &mut self.linger_ns),
            ("wake_ns", &mut self.wake_ns),
            ("decided_ns", &mut self.decided_ns),
            ("flag_ns", &mut self.flag_ns),
            ("slice_ns", &mut self.slice_ns),
            ("part_ns", &mut self.part_ns),
            ("hosts_permille", &mut self.hosts_permille),
            ("best_effort_percent", &mut self.best_effort_percent),
        ];
        let names = all.each_ref().map(|(name, _)| *name).join(", ");
        let found = all.into_iter().find(|(known, _)| *known == name);
        let (_, figure) = found.ok_or(format!("no figure `{name}`; there are {names}"))?;
        if value > FIGURE_MAX {
            return Err(format!("{value}: expected at most {FIGURE_MAX}"));
        }
        *figure = value;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_set_by_its_name() {
        let mut model = Model::default();
        model.set("linger_ns", 7).unwrap();
        assert_eq!(model, Model { linger_ns: 7, ..Model::default() });
        let said = model.set("linger_us", 7).unwrap_err();
        assert!(said.contains("linger_us") && said.contains("linger_ns"), "{said}");
        assert!(model.set("wake_ns", FIGURE_MAX + 1).unwrap_err().contains("at most"));
        assert_eq!(model, Model { linger_ns: 7, ..Model::default() });
    }
}
