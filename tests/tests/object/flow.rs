//! Where a program's context pointer may go: a data flow over the instructions of an object, on the safe side.
//!
//! A value is *foreign* if it may be the context pointer or be made from it, or may be a pointer that was loaded from the
//! context (a packet's data, a socket). Registers, stack slots and the functions that a program calls are followed over every
//! path; where two paths meet, what may be foreign on one is foreign. The invariant: a store that is not reported goes
//! through a pointer that no path has made from the context. What the analysis does not know it refuses.

#![expect(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "offsets in an object of some kilobytes, and slots that were clamped"
)]

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::elf::{Elf, FUNCTION, Symbol, number};

const STACK_SLOTS: usize = 64;
const REGISTERS: usize = 11;
const FRAME: usize = 10;
/// The kernel allows eight frames.
const MAX_DEPTH: usize = 8;

/// Something that a program does to what is not its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Finding {
    /// A store, or an atomic operation, through a foreign pointer.
    Store { function: String, at: usize },
    /// A foreign pointer is written into memory that is not the function's own stack.
    Escape { function: String, at: usize },
    /// A helper is given a foreign pointer in an argument other than the first.
    Passed {
        function: String,
        at: usize,
        helper: u32,
        /// Counted from 1.
        argument: usize,
    },
    /// A function of the kernel (kfunc), or an instruction that is not known.
    Unknown { function: String, at: usize },
}

/// What a program does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// What it must not do in observe mode, each once.
    pub(crate) findings: Vec<Finding>,
    /// Helpers that it calls, and whether any call may get the context.
    pub(crate) helpers: BTreeMap<u32, bool>,
    /// What it can return; none if anything.
    pub(crate) returns: Option<Vec<i32>>,
}

impl Report {
    fn add(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }
}

/// Where a pointer into a stack points.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stack {
    /// It is none.
    #[default]
    No,
    /// At this offset from the end of the function's own frame.
    Own(i64),
    /// Anywhere in the own frame.
    OwnAnywhere,
    /// Into a caller's frame.
    Callers,
}

/// What may be in a register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Value {
    foreign: bool,
    stack: Stack,
    /// The number, where it is one.
    number: Option<i64>,
}

impl Value {
    fn foreign_if(foreign: bool) -> Self {
        Self {
            foreign,
            ..Self::default()
        }
    }

    fn number(number: i64) -> Self {
        Self {
            number: Some(number),
            ..Self::default()
        }
    }

    fn meet(self, other: Self) -> Self {
        let stack = match (self.stack, other.stack) {
            (one, same) if one == same => one,
            (Stack::Callers, _) | (_, Stack::Callers) => Stack::Callers,
            // On one path it is none: a store through it may or may not go to the frame.
            _ => Stack::OwnAnywhere,
        };
        Self {
            foreign: self.foreign || other.foreign,
            stack,
            number: self.number.filter(|_| self.number == other.number),
        }
    }
}

/// What may be anywhere at one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    registers: [Value; REGISTERS],
    /// Whether a slot of eight bytes, counted down from the frame's end, may hold a foreign pointer.
    slots: [bool; STACK_SLOTS],
    /// Pointers into stacks that lie in a slot are not followed: whether there may be any.
    spilled: Stack,
}

impl State {
    fn meet(&mut self, other: &Self) -> bool {
        let before = self.clone();
        for (one, two) in self.registers.iter_mut().zip(other.registers) {
            *one = one.meet(two);
        }
        for (one, two) in self.slots.iter_mut().zip(other.slots) {
            *one |= two;
        }
        self.spilled = spill(self.spilled, other.spilled);
        *self != before
    }
}

/// What is known of pointers into stacks that lie in memory, after one more was written there.
fn spill(known: Stack, written: Stack) -> Stack {
    match (known, written) {
        (Stack::Callers, _) | (_, Stack::Callers) => Stack::Callers,
        (Stack::No, Stack::No) => Stack::No,
        _ => Stack::OwnAnywhere,
    }
}

#[derive(Clone, Copy, Debug)]
struct Instruction {
    code: u8,
    dst: usize,
    src: usize,
    off: i64,
    imm: i64,
}

/// The analysis of one object.
pub(crate) struct Flow<'a> {
    elf: Elf<'a>,
    symbols: Vec<Symbol<'a>>,
    /// Whether four bytes at an offset of the context, or eight anywhere, are a pointer.
    packet_pointers: bool,
}

/// Offsets of `data`, `data_end` and `data_meta` in `struct __sk_buff`, which reads of four bytes turn into pointers.
const PACKET_POINTERS: [i64; 3] = [76, 80, 140];

impl<'a> Flow<'a> {
    /// Reads an object.
    pub(crate) fn new(file: &'a [u8]) -> Result<Self> {
        let elf = Elf::read(file)?;
        let symbols = elf.symbols()?;
        Ok(Self {
            elf,
            symbols,
            packet_pointers: false,
        })
    }

    /// What a program does on any path; `packet_pointers` for those whose context is a packet's.
    pub(crate) fn program(&mut self, name: &str, packet_pointers: bool) -> Result<Report> {
        self.packet_pointers = packet_pointers;
        let function = self
            .symbols
            .iter()
            .find(|symbol| symbol.kind == FUNCTION && symbol.name == name)
            .copied()
            .with_context(|| format!("no program {name}"))?;
        let mut entry = [Value::default(); REGISTERS];
        entry[1] = Value::foreign_if(true);
        let mut report = Report::default();
        let returned = self.function(function, &entry, false, &mut report, 0)?;
        report.returns = returned
            .into_iter()
            .map(|value| value.number.map(|n| n as i32))
            .collect();
        if let Some(returns) = &mut report.returns {
            returns.sort_unstable();
            returns.dedup();
        }
        Ok(report)
    }

    /// Follows a function from given arguments; `callers_hold` if foreign pointers may lie in callers' frames. Gives what each
    /// of its exits may return.
    fn function(
        &self,
        function: Symbol<'_>,
        entry: &[Value; REGISTERS],
        callers_hold: bool,
        report: &mut Report,
        depth: usize,
    ) -> Result<Vec<Value>> {
        ensure!(depth < MAX_DEPTH, "{} is called too deep", function.name);
        let code = self.decode(function)?;
        let mut start = State {
            registers: *entry,
            slots: [false; STACK_SLOTS],
            spilled: Stack::No,
        };
        start.registers[FRAME] = Value {
            stack: Stack::Own(0),
            ..Value::default()
        };
        let mut states: BTreeMap<usize, State> = BTreeMap::from([(0, start)]);
        let mut due = vec![0];
        let mut exits: BTreeMap<usize, Value> = BTreeMap::new();
        while let Some(at) = due.pop() {
            let mut state = states.get(&at).context("a place without a state")?.clone();
            let step = Step {
                function: function.name,
                at,
                callers_hold,
            };
            let instruction = *code
                .get(at)
                .with_context(|| format!("{} runs off its end", function.name))?;
            let next = if instruction.code == CALL && instruction.src == PSEUDO_CALL {
                self.call(function, at, instruction, &mut state, &step, report, depth)?;
                vec![at + 1]
            } else if instruction.code == EXIT {
                let returned = state.registers[0];
                let known = exits.entry(at).or_insert(returned);
                *known = known.meet(returned);
                Vec::new()
            } else {
                step.run(instruction, &mut state, self.packet_pointers, report)?
            };
            for place in next {
                let changed = if let Some(known) = states.get_mut(&place) {
                    known.meet(&state)
                } else {
                    states.insert(place, state.clone());
                    true
                };
                if changed && !due.contains(&place) {
                    due.push(place);
                }
            }
        }
        Ok(exits.into_values().collect())
    }

    /// A call of another function of the object.
    #[expect(clippy::too_many_arguments, reason = "a step's place and what it changes")]
    fn call(
        &self,
        function: Symbol<'_>,
        at: usize,
        instruction: Instruction,
        state: &mut State,
        step: &Step<'_>,
        report: &mut Report,
        depth: usize,
    ) -> Result<()> {
        let callee = self.callee(function, at, instruction)?;
        let holds = step.callers_hold || state.slots.contains(&true);
        let mut entry = [Value::default(); REGISTERS];
        for (argument, value) in entry.iter_mut().zip(state.registers).take(6).skip(1) {
            *argument = value;
            if value.stack != Stack::No {
                argument.stack = Stack::Callers;
            }
        }
        let returned = self.function(callee, &entry, holds, report, depth + 1)?;
        let mut result = returned.into_iter().reduce(Value::meet).unwrap_or_default();
        if result.stack == Stack::Callers {
            // Some argument of this call: then it points into this frame, or further up.
            let further = (state.registers[1..6].iter()).any(|value| value.stack == Stack::Callers);
            result.stack = if further { Stack::Callers } else { Stack::OwnAnywhere };
        }
        state.registers[0] = result;
        for register in &mut state.registers[1..6] {
            *register = Value::default();
        }
        Ok(())
    }

    /// The function that an instruction calls.
    fn callee(&self, function: Symbol<'_>, at: usize, instruction: Instruction) -> Result<Symbol<'a>> {
        let here = function.value + at * 8;
        let (section, place) = match self.elf.relocation(function.section, here)? {
            Some(index) => {
                let symbol = self.symbols.get(index).context("a relocation against no symbol")?;
                (symbol.section, symbol.value as i64 + (instruction.imm + 1) * 8)
            }
            None => (function.section, here as i64 + (instruction.imm + 1) * 8),
        };
        self.symbols
            .iter()
            .find(|symbol| symbol.kind == FUNCTION && symbol.section == section && symbol.value as i64 == place)
            .copied()
            .with_context(|| format!("{} calls what is no function", function.name))
    }

    fn decode(&self, function: Symbol<'_>) -> Result<Vec<Instruction>> {
        let section = self.elf.content(function.section)?;
        let bytes = section
            .get(function.value..function.value + function.size)
            .with_context(|| format!("{} lies outside its section", function.name))?;
        let mut code = bytes
            .chunks_exact(8)
            .map(|bytes| {
                Ok(Instruction {
                    code: bytes[0],
                    dst: usize::from(bytes[1] & 0xf),
                    src: usize::from(bytes[1] >> 4),
                    off: i64::from(number::<2>(bytes, 2)? as i16),
                    imm: i64::from(number::<4>(bytes, 4)? as i32),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        for at in 1..code.len() {
            // The upper half of a long immediate stands in the place behind it.
            let upper = code[at].imm << 32;
            if code[at - 1].code == LDDW {
                code[at - 1].imm = upper | (code[at - 1].imm & 0xffff_ffff);
            }
        }
        Ok(code)
    }
}

const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// `src` of a call: another function of the object.
const PSEUDO_CALL: usize = 1;

const CLASS: u8 = 0x07;
const LD: u8 = 0x00;
const LDX: u8 = 0x01;
const ST: u8 = 0x02;
const STX: u8 = 0x03;
const ALU: u8 = 0x04;
const JMP: u8 = 0x05;
const JMP32: u8 = 0x06;
const ALU64: u8 = 0x07;
/// The way of a load or store.
const MODE: u8 = 0xe0;
const MEM: u8 = 0x60;
const MEMSX: u8 = 0x80;
const ATOMIC: u8 = 0xc0;
/// Its width: only eight bytes hold a pointer.
const SIZE: u8 = 0x18;
const EIGHT: u8 = 0x18;
const FOUR: u8 = 0x00;
/// The second operand is a register.
const BY_REGISTER: u8 = 0x08;
const OPERATION: u8 = 0xf0;
const ADD: u8 = 0x00;
const SUB: u8 = 0x10;
const MOV: u8 = 0xb0;
const JA: u8 = 0x00;
/// An immediate of eight bytes.
const LDDW: u8 = 0x18;

/// One instruction at its place.
struct Step<'f> {
    function: &'f str,
    at: usize,
    /// Whether foreign pointers may lie in callers' frames.
    callers_hold: bool,
}

impl Step<'_> {
    /// Does to the state what the instruction does; gives where it goes on.
    fn run(&self, i: Instruction, state: &mut State, packet: bool, report: &mut Report) -> Result<Vec<usize>> {
        ensure!(
            i.dst < REGISTERS && i.src < REGISTERS,
            "no such register at {}",
            self.at
        );
        match i.code & CLASS {
            LD if i.code == LDDW => {
                // Anything but a plain number is a map's, or a function's, address.
                state.registers[i.dst] = if i.src == 0 {
                    Value::number(i.imm)
                } else {
                    Value::default()
                };
                return Ok(vec![self.at + 2]);
            }
            LDX if [MEM, MEMSX].contains(&(i.code & MODE)) => self.load(i, state, packet),
            ST if i.code & MODE == MEM => self.store(i, Value::default(), state, report),
            STX if i.code & MODE == MEM => {
                let value = state.registers[i.src];
                self.store(i, value, state, report);
            }
            STX if i.code & MODE == ATOMIC => {
                let value = state.registers[i.src];
                self.store(i, value, state, report);
                // Where it fetches, what was there comes back, and CMPXCHG has it in the first register.
                let there = Value::foreign_if(value.foreign || state.slots.contains(&true) || self.callers_hold);
                state.registers[i.src] = state.registers[i.src].meet(there);
                state.registers[0] = state.registers[0].meet(there);
            }
            ALU | ALU64 => compute(i, state),
            JMP if i.code == CALL => self.helper(i, state, report),
            JMP | JMP32 => {
                let far = if i.code & CLASS == JMP32 && i.code & OPERATION == JA {
                    i.imm
                } else {
                    i.off
                };
                let target = usize::try_from(self.at as i64 + 1 + far).context("a jump before the function")?;
                return Ok(if i.code & OPERATION == JA {
                    vec![target]
                } else {
                    vec![self.at + 1, target]
                });
            }
            _ => bail!(
                "{}: instruction {} ({:#04x}) is not known",
                self.function,
                self.at,
                i.code
            ),
        }
        Ok(vec![self.at + 1])
    }

    fn load(&self, i: Instruction, state: &mut State, packet: bool) {
        let base = state.registers[i.src];
        let whole = i.code & SIZE == EIGHT;
        let mut value = Value::default();
        if base.foreign {
            value.foreign |= whole || (packet && i.code & SIZE == FOUR && PACKET_POINTERS.contains(&i.off));
        }
        // A part of a pointer is a number, to the kernel too.
        if whole {
            match base.stack {
                Stack::No => {}
                Stack::Own(from) => {
                    let (slots, _) = touched(from + i.off, 8);
                    value.foreign |= slots.clone().any(|slot| state.slots[slot]);
                    value.stack = state.spilled;
                }
                Stack::OwnAnywhere => {
                    value.foreign |= state.slots.contains(&true);
                    value.stack = state.spilled;
                }
                Stack::Callers => {
                    value.foreign |= self.callers_hold;
                    value.stack = Stack::Callers;
                }
            }
        }
        state.registers[i.dst] = value;
    }

    fn store(&self, i: Instruction, value: Value, state: &mut State, report: &mut Report) {
        let base = state.registers[i.dst];
        let (function, at) = (self.function.to_owned(), self.at);
        if base.foreign {
            report.add(Finding::Store { function, at });
            return;
        }
        let whole = i.code & SIZE == EIGHT;
        match base.stack {
            Stack::Own(from) => {
                let width = match i.code & SIZE {
                    EIGHT => 8,
                    FOUR => 4,
                    0x08 => 2,
                    _ => 1,
                };
                let (slots, all) = touched(from + i.off, width);
                for slot in slots {
                    // A whole slot is overwritten by what is stored; a part of it makes no pointer.
                    state.slots[slot] = value.foreign || (state.slots[slot] && !(whole && all));
                }
            }
            Stack::OwnAnywhere if value.foreign => state.slots = [true; STACK_SLOTS],
            Stack::No | Stack::Callers if value.foreign => {
                report.add(Finding::Escape { function, at });
            }
            _ => {}
        }
        if base.stack != Stack::No && whole {
            state.spilled = spill(state.spilled, value.stack);
        }
    }

    /// A call of the kernel.
    fn helper(&self, i: Instruction, state: &mut State, report: &mut Report) {
        let (function, at) = (self.function.to_owned(), self.at);
        if i.src != 0 {
            report.add(Finding::Unknown { function, at });
        } else if let Ok(helper) = u32::try_from(i.imm) {
            *report.helpers.entry(helper).or_default() |= state.registers[1].foreign;
            for (argument, _) in (state.registers.iter().enumerate().take(6).skip(2)).filter(|(_, value)| value.foreign)
            {
                report.add(Finding::Passed {
                    function: function.clone(),
                    at,
                    helper,
                    argument,
                });
            }
        }
        // What a helper gives for the context is the context's: a socket, say.
        state.registers[0] = Value::foreign_if(state.registers[1].foreign && gives_pointer(i.imm));
        for register in &mut state.registers[1..6] {
            *register = Value::default();
        }
    }
}

/// Helpers that turn a socket into another kind of itself: `bpf_skc_to_*`, `bpf_sk_fullsock`, `bpf_tcp_sock`.
fn gives_pointer(helper: i64) -> bool {
    [95, 96, 98, 136, 137, 138, 139, 140, 178].contains(&helper)
}

/// The slots that so many bytes at an offset from the frame's end lie in, and whether they are whole slots.
fn touched(offset: i64, width: i64) -> (std::ops::Range<usize>, bool) {
    let limit = STACK_SLOTS as i64;
    // Slot 0 is the highest: bytes -8..0.
    let first = (-(offset + width)).div_euclid(8).clamp(0, limit);
    let last = (-offset + 7).div_euclid(8).clamp(first, limit);
    (first as usize..last as usize, offset % 8 == 0 && width == 8)
}

fn compute(i: Instruction, state: &mut State) {
    let wide = i.code & CLASS == ALU64;
    let operand = if i.code & BY_REGISTER == 0 {
        Value::number(i.imm)
    } else {
        state.registers[i.src]
    };
    let before = state.registers[i.dst];
    let offset = |sign: i64| match (before.stack, operand.number) {
        (Stack::Own(at), Some(n)) if wide && operand.stack == Stack::No => Stack::Own(at + sign * n),
        _ => spill(before.stack, operand.stack),
    };
    state.registers[i.dst] = match i.code & OPERATION {
        // With an offset it is a sign extension, which makes no pointer, but the safe side costs nothing.
        MOV => Value {
            number: operand.number.filter(|_| i.off == 0),
            ..operand
        },
        ADD => Value {
            foreign: before.foreign || operand.foreign,
            stack: offset(1),
            number: None,
        },
        SUB => Value {
            foreign: before.foreign || operand.foreign,
            stack: offset(-1),
            number: None,
        },
        _ => Value {
            foreign: before.foreign || (operand.foreign && i.code & BY_REGISTER != 0),
            stack: spill(before.stack, operand.stack),
            number: None,
        },
    };
}
