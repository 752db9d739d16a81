//! Steps of our parallel strategies and of torch's, in turn: DDP, FSDP2, tensor parallel blocks and
//! 1F1B over gloo on the CPU.
//!
//! Each side has a process for each rank, and each rank computes on one thread. Processes of the
//! other side wait for their next line meanwhile:
//!
//! ```text
//!   each round:  alone ours, alone torch's | data ours, data torch's | ..       a line with the case to each rank
//!   the next:    alone torch's, alone ours | ..                                 until all ranks answer
//! ```
//!
//! Both train the same model from the same weights, and their losses are compared. *alone* is the
//! same step on each rank without the others. `SIDELANE_PYTHON` names a Python with torch.

mod ours;

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const HIDDEN: usize = 256;
const FFN: usize = 1024;
const BLOCKS: usize = 4;
/// Of a rank, or of all if each rank has the same.
const TOKENS: usize = 256;
const MICROBATCHES: usize = 8;
const BUCKET_BYTES: usize = 2 << 20;
const LEARNING_RATE: f32 = 1e-4;
/// Steps of each side, and those before them that are not timed.
const ROUNDS: usize = 20;
const WARM_UP: usize = 3;
const CASES: [(&str, &str); 5] = [
    ("alone", "alone"),
    ("data", "DataParallel, DDP"),
    ("fully-sharded", "FullySharded, FSDP2"),
    ("tensor", "Column and row parallel, DTensor"),
    ("pipeline", "Pipeline, Schedule1F1B"),
];

/// The processes of a side.
struct Side {
    name: String,
    ranks: Vec<(Child, ChildStdin, BufReader<ChildStdout>)>,
}

/// A step, as all ranks have made it.
struct Answer {
    time: Duration,
    /// The most that a rank moved.
    bytes: u64,
    /// By rank; of a pipeline the last one alone has it.
    losses: Vec<f32>,
}

impl Side {
    fn start(commands: impl Iterator<Item = Command>) -> Result<Side, Box<dyn Error>> {
        let mut ranks = Vec::new();
        for mut command in commands {
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let (to, from) = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
            ranks.push((child, to, BufReader::new(from)));
        }
        let mut name = String::new();
        for (_, _, from) in &mut ranks {
            name.clear();
            from.read_line(&mut name)?;
        }
        Ok(Side { name: name.trim().to_owned(), ranks })
    }

    fn step(&mut self, case: &str) -> Result<Answer, Box<dyn Error>> {
        let begin = Instant::now();
        for (_, to, _) in &mut self.ranks {
            writeln!(to, "{case}")?;
        }
        let mut answer = Answer { time: Duration::ZERO, bytes: 0, losses: Vec::new() };
        for (_, _, from) in &mut self.ranks {
            let mut line = String::new();
            from.read_line(&mut line)?;
            let (bytes, loss) = line.trim().split_once(' ').ok_or("a rank has ended")?;
            answer.bytes = answer.bytes.max(bytes.parse()?);
            answer.losses.push(loss.parse()?);
        }
        answer.time = begin.elapsed();
        Ok(answer)
    }

    fn end(self) -> Result<(), Box<dyn Error>> {
        for (mut child, to, from) in self.ranks {
            drop((to, from));
            child.wait()?;
        }
        Ok(())
    }
}

fn ours(ranks: usize) -> Result<Side, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    Side::start((0..ranks).map(|rank| {
        let mut command = Command::new(&program);
        let numbers = [
            ("RANK", rank),
            ("WORLD_SIZE", ranks),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", ranks),
            ("MASTER_PORT", usize::from(port)),
        ];
        command.arg("rank").envs(numbers.map(|(name, number)| (name, number.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").env("SIDELANE_JOB", format!("bench at {port}"));
        command.env("SIDELANE_HEAP", "64M").env("SIDELANE_SYMMETRIC", "32M");
        command
    }))
}

fn torch(ranks: usize) -> Result<Side, Box<dyn Error>> {
    let python = std::env::var_os("SIDELANE_PYTHON").unwrap_or_else(|| "python3".into());
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/parallel.py");
    let store = std::env::temp_dir().join(format!("sidelane-bench-{}-{ranks}", std::process::id()));
    let side = Side::start((0..ranks).map(|rank| {
        let mut command = Command::new(&python);
        let numbers = [rank, ranks, HIDDEN, FFN, BLOCKS, TOKENS];
        command.arg(program).args(numbers.map(|number| number.to_string())).arg(&store);
        command.env("OMP_NUM_THREADS", "1").env("GLOO_SOCKET_IFNAME", "lo");
        command
    }));
    // The store may be there, or not.
    let _ = std::fs::remove_file(&store);
    side
}

/// Steps of one case.
#[derive(Default)]
struct Steps {
    /// Of ours and of torch, in milliseconds, by round.
    times: [Vec<f64>; 2],
    bytes: [u64; 2],
}

impl Steps {
    /// Makes a step on each side, and checks that both compute the same, but for the order of sums.
    fn round(&mut self, case: &str, nth: usize, sides: &mut [Side; 2]) -> Result<(), Box<dyn Error>> {
        // Each side goes first as often as the other.
        let order = if nth.is_multiple_of(2) { [0, 1] } else { [1, 0] };
        let mut losses = [Vec::new(), Vec::new()];
        for side in order {
            let answer = sides[side].step(case)?;
            losses[side] = answer.losses;
            if nth >= WARM_UP {
                self.times[side].push(answer.time.as_secs_f64() * 1e3);
                self.bytes[side] = answer.bytes;
            }
        }
        let near = |(ours, torch): (&f32, &f32)| (ours - torch).abs() <= 1e-3 * torch.abs();
        if losses[0].iter().zip(&losses[1]).all(near) {
            return Ok(());
        }
        Err(format!("{case}, step {nth}: losses {losses:?}").into())
    }

    fn row(&self, title: &str) -> String {
        let [ours, torch] = [0, 1].map(|side| quantile(self.times[side].clone(), 0.5));
        let ratios = self.times[0].iter().zip(&self.times[1]).map(|(ours, torch)| ours / torch);
        let [low, ratio, high] = [0.25, 0.5, 0.75].map(|at| quantile(ratios.clone().collect(), at));
        let [of_ours, of_torch] = self.bytes.map(|bytes| bytes as f64 / 1e6);
        format!(
            "| {title} | {ours:.0} ms | {torch:.0} ms | {ratio:.2} ({low:.2}-{high:.2}) \
             | {of_ours:.1} MB | {of_torch:.1} MB |"
        )
    }
}

fn quantile(mut values: Vec<f64>, at: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * at).round() as usize]
}

fn measure(ranks: usize) -> Result<(), Box<dyn Error>> {
    let torch = match torch(ranks) {
        Ok(side) if !side.name.is_empty() => side,
        _ => {
            println!("no torch: SIDELANE_PYTHON names a Python that has it");
            return Ok(());
        }
    };
    let mut sides = [ours(ranks)?, torch];
    let mut steps = CASES.map(|_| Steps::default());
    for round in 0..WARM_UP + ROUNDS {
        for ((case, _), steps) in CASES.iter().zip(&mut steps) {
            steps.round(case, round, &mut sides)?;
        }
    }
    println!("{ranks} ranks, {} and {}", sides[0].name, sides[1].name);
    println!("| strategy | ours | torch | ours / torch | bytes of ours | bytes of torch |");
    println!("|---|---|---|---|---|---|");
    for ((_, title), steps) in CASES.iter().zip(&steps) {
        println!("{}", steps.row(title));
    }
    sides.into_iter().try_for_each(Side::end)
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).is_some_and(|role| role == "rank") {
        return ours::run();
    }
    println!("{BLOCKS} blocks of {HIDDEN} and {FFN}, {TOKENS} tokens, f32; medians of {ROUNDS} steps");
    [2, 4].into_iter().try_for_each(measure)
}
