//! Branches, calls, barriers, and what the lanes of a warp do together.

use super::{B32, B64, Decoder, Kind, Mods, Result};
use crate::ast::{Class, Instr, Operand};
use crate::ir::{
    Bar, BarKind, Builtin, Call, NONE, Op, PSrc, Place, R, Redux, Shuffle, Target, Vote,
};
use crate::regs;

impl Decoder<'_> {
    pub(super) fn control(&mut self, root: &str, i: &Instr, m: &mut Mods<'_>) -> Result<bool> {
        match root {
            "bra" => {
                m.take("uni");
                let Operand::Name(name, scope) = self.arg(i, 0)? else {
                    return Err("a label belongs here".into());
                };
                let target = regs::label_target(self.f, name, *scope)
                    .ok_or_else(|| format!("label `{name}` is not defined"))?;
                self.emit(Op::Bra(target));
            }
            "brx" => {
                m.take("idx");
                m.take("uni");
                let a = self.src(self.arg(i, 0)?, B32)?;
                let table = regs::targets(self.f, i);
                let Operand::Name(name, _) = self.arg(i, 1)? else {
                    return Err("a table belongs here".into());
                };
                if self.f.tables.get(name).is_none_or(|t| t.len() != table.len()) {
                    return Err(format!("table `{name}` or one of its labels is not defined"));
                }
                self.emit(Op::BrxIdx(a, table.into()));
            }
            "call" => {
                m.take("uni");
                self.call(i)?;
            }
            "ret" => {
                m.take("uni");
                self.emit(Op::Ret);
            }
            "exit" => self.emit(Op::Exit),
            "trap" | "brkpt" => self.emit(Op::Trap),
            "nanosleep" => {
                m.ty()?;
                self.emit(Op::Sleep);
            }
            "pmevent" | "setmaxnreg" | "griddepcontrol" => {
                while m.next().is_some() {}
                self.emit(Op::Nop);
            }
            "bar" | "barrier" => self.barrier(i, m)?,
            "vote" => self.vote(i, m)?,
            "shfl" => self.shfl(i, m)?,
            "match" => self.matching(i, m)?,
            "redux" => self.redux(i, m)?,
            "elect" => {
                m.take("sync");
                let (d, p) = self.pair(self.arg(i, 0)?);
                let (d, p) = (self.dst(d, 32)?, p.map_or(Ok(NONE), |p| self.pdst(p))?);
                let mask = self.src(self.arg(i, 1)?, B32)?;
                self.emit(Op::Elect { d, p, mask });
            }
            "activemask" => {
                m.ty()?;
                let d = self.dst(self.arg(i, 0)?, 32)?;
                self.emit(Op::ActiveMask(d));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn actual(&mut self, op: &Operand) -> Result<Place> {
        match op {
            Operand::Sym(crate::ast::Sym::Frame(at), _) => Ok(Place::Frame(*at)),
            Operand::Reg(r) if self.class(*r) != Class::W128 => Ok(self.place(*r)),
            Operand::Sink => Ok(Place::None),
            Operand::Int(v) => Ok(Place::Row32(self.constant(*v, 32))),
            _ => Err("an argument of this form is not implemented".into()),
        }
    }

    fn call(&mut self, i: &Instr) -> Result<()> {
        let mut args = i.args.as_slice();
        let mut rets = &[][..];
        if let [Operand::List(list), rest @ ..] = args {
            (rets, args) = (list.as_slice(), rest);
        }
        let [target, rest @ ..] = args else { return Err("no target".into()) };
        let actuals = match rest {
            [Operand::List(list), ..] => list.as_slice(),
            _ => &[][..],
        };
        let target = match target {
            Operand::Reg(_) => Target::Row(self.src(target, B64)?),
            Operand::Name(name, _) => self.callee(name)?,
            _ => return Err("no such target".into()),
        };
        if rets.iter().any(|op| matches!(op, Operand::Int(_))) {
            return Err("a result needs a place".into());
        }
        let rets: Result<Vec<Place>> = rets.iter().map(|op| self.actual(op)).collect();
        let args: Result<Vec<Place>> = actuals.iter().map(|op| self.actual(op)).collect();
        let (args, rets) = (args?.into_boxed_slice(), rets?.into_boxed_slice());
        if let Target::Direct(local) = target {
            let callee = self
                .local
                .iter()
                .find(|(_, l)| **l == local)
                .map(|(m, _)| &self.unit.functions[*m]);
            if callee.is_some_and(|f| f.params.len() != args.len() || f.rets.len() != rets.len()) {
                return Err("the arguments do not match the function".into());
            }
        }
        self.emit(Op::Call(Box::new(Call { target, args, rets })));
        Ok(())
    }

    fn callee(&self, name: &str) -> Result<Target> {
        let found = self.unit.function(name);
        if let Some(local) = found.and_then(|f| self.local.get(&f)) {
            return Ok(Target::Direct(*local));
        }
        Ok(Target::Builtin(match name {
            "vprintf" => Builtin::Vprintf,
            "malloc" => Builtin::Malloc,
            "free" => Builtin::Free,
            "__assertfail" => Builtin::AssertFail,
            _ => return Err(format!("function `{name}` has no body")),
        }))
    }

    fn barrier(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        if m.take("cluster") {
            // A cluster of one block: arriving and waiting together are its barrier.
            let arrive = m.take("arrive");
            while m.next().is_some() {}
            if arrive {
                self.emit(Op::Fence);
                return Ok(());
            }
            let id = self.constant(0, 32);
            let (kind, count) = (BarKind::Sync, NONE);
            self.emit(Op::Bar(Box::new(Bar { kind, id, count, src: PSrc::Fixed(true) })));
            return Ok(());
        }
        m.take("cta");
        if m.take("warp") {
            m.take("sync");
            let mask = self.src(self.arg(i, 0)?, B32)?;
            self.emit(Op::WarpSync(mask));
            return Ok(());
        }
        let what = m.take_any(&["sync", "arrive", "red"]).ok_or("no such barrier")?;
        let op = m.take_any(&["popc", "and", "or"]);
        m.take("aligned");
        if what == "red" {
            m.ty()?;
        }
        let red = what == "red";
        let from = usize::from(red);
        // `bar.sync a, b` and `bar.red.op d, a, b, p`: `b` may be left out.
        let has_count = i.args.len() > from + 1 + usize::from(red);
        let id = self.src(self.arg(i, from)?, B32)?;
        let count = if has_count { self.src(self.arg(i, from + 1)?, B32)? } else { NONE };
        let mut src = PSrc::Fixed(true);
        let kind = match what {
            "sync" => BarKind::Sync,
            "arrive" => BarKind::Arrive,
            _ => {
                src = self.psrc(i.args.last().ok_or("no predicate")?)?;
                match op {
                    Some("popc") => BarKind::Popc(self.dst(self.arg(i, 0)?, 32)?),
                    Some("and") => BarKind::And(self.pdst(self.arg(i, 0)?)?),
                    _ => BarKind::Or(self.pdst(self.arg(i, 0)?)?),
                }
            }
        };
        self.emit(Op::Bar(Box::new(Bar { kind, id, count, src })));
        Ok(())
    }

    /// The lanes that take part; without `.sync`, those that are there.
    fn membermask(&mut self, i: &Instr, at: usize, sync: bool) -> Result<R> {
        if sync { self.src(self.arg(i, at)?, B32) } else { Ok(NONE) }
    }

    fn vote(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let sync = m.take("sync");
        let k = match m.take_any(&["all", "any", "uni", "ballot"]) {
            Some("all") => Vote::All,
            Some("any") => Vote::Any,
            Some("uni") => Vote::Uni,
            Some(_) => Vote::Ballot,
            None => return Err("no such vote".into()),
        };
        m.ty()?;
        let d = match k {
            Vote::Ballot => self.dst(self.arg(i, 0)?, 32)?,
            _ => self.pdst(self.arg(i, 0)?)?,
        };
        let src = self.psrc(self.arg(i, 1)?)?;
        let mask = self.membermask(i, 2, sync)?;
        self.emit(Op::Vote { k, d, src, mask });
        Ok(())
    }

    fn shfl(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let sync = m.take("sync");
        let k = match m.take_any(&["up", "down", "bfly", "idx"]) {
            Some("up") => Shuffle::Up,
            Some("down") => Shuffle::Down,
            Some("bfly") => Shuffle::Bfly,
            Some(_) => Shuffle::Idx,
            None => return Err("no such shuffle".into()),
        };
        m.ty()?;
        let (d, p) = self.pair(self.arg(i, 0)?);
        let (d, p) = (self.dst(d, 32)?, p.map_or(Ok(NONE), |p| self.pdst(p))?);
        let a = self.src(self.arg(i, 1)?, B32)?;
        let b = self.src(self.arg(i, 2)?, B32)?;
        let c = self.src(self.arg(i, 3)?, B32)?;
        let mask = self.membermask(i, 4, sync)?;
        self.emit(Op::Shfl { k, d, p, a, b, c, mask });
        Ok(())
    }

    fn matching(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        let all = m.take_any(&["any", "all"]) == Some("all");
        m.take("sync");
        let ty = m.ty()?;
        let (d, p) = self.pair(self.arg(i, 0)?);
        let (d, p) = (self.dst(d, 32)?, p.map_or(Ok(NONE), |p| self.pdst(p))?);
        let a = self.src(self.arg(i, 1)?, ty)?;
        let mask = self.src(self.arg(i, 2)?, B32)?;
        self.emit(Op::Match { all, d, p, a, wide: ty.wide(), mask });
        Ok(())
    }

    fn redux(&mut self, i: &Instr, m: &mut Mods<'_>) -> Result<()> {
        m.take("sync");
        let op = m.take_any(&["add", "min", "max", "and", "or", "xor"]).ok_or("no operation")?;
        let ty = m.ty()?;
        let k = match (op, ty.kind) {
            ("min", Kind::Float) => Redux::FMin,
            ("max", Kind::Float) => Redux::FMax,
            ("add", _) => Redux::Add,
            ("min", Kind::Signed) => Redux::MinS,
            ("max", Kind::Signed) => Redux::MaxS,
            ("min", _) => Redux::Min,
            ("max", _) => Redux::Max,
            ("and", _) => Redux::And,
            ("or", _) => Redux::Or,
            _ => Redux::Xor,
        };
        let d = self.dst(self.arg(i, 0)?, 32)?;
        let a = self.src(self.arg(i, 1)?, B32)?;
        let mask = self.src(self.arg(i, 2)?, B32)?;
        self.emit(Op::Redux { k, d, a, mask });
        Ok(())
    }
}
