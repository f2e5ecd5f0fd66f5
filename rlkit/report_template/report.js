// Inflates plotly.js, draws every figure of the page, and keeps their colours in step with the page's theme.
(async () => {
  const plots = [...document.querySelectorAll(".rlkit-figure .plot")];
  const style = getComputedStyle(document.documentElement);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
    displaylogo: false,
    // Without the button that uploads a chart to be shared.
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    displayModeBar: matchMedia("(hover: hover)").matches && "hover",
  };
  const PRINT_WIDTH = 680; // px: A4 and Letter between the margins of @page
  const CLEAR = "rgba(0,0,0,0)";
  const BRIGHTER = { "#0072B2": "#4BA3E3" }; // the blue of thin lines is too dark on a dark page

  // A figure as it looks in a theme; made anew each time, because plotly writes into what it is given.
  const dressed = (plot, theme, size) => {
    const { data, layout } = JSON.parse(plot.parentElement.querySelector("script").textContent);
    const [ink, soft, rule, panel] = ["ink", "soft", "rule", "panel"].map((name) =>
      style.getPropertyValue(`--${theme}-${name}`).trim(),
    );
    Object.assign(layout, size, { paper_bgcolor: CLEAR, plot_bgcolor: CLEAR, uirevision: "kept" });
    layout.font = { ...layout.font, color: ink };
    layout.hoverlabel = { bgcolor: panel, bordercolor: rule, font: { color: ink } };
    layout.modebar = { bgcolor: CLEAR, color: soft, activecolor: ink };
    for (const axis of ["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d+$/.test(name))]) {
      layout[axis] = { ...layout[axis], gridcolor: rule, linecolor: soft, tickcolor: soft };
    }
    for (const part of theme === "dark" ? data.flatMap((trace) => [trace.line, trace.marker]) : []) {
      if (part && BRIGHTER[part.color]) part.color = BRIGHTER[part.color];
    }
    return [data, layout];
  };
  const draw = (theme, size = {}) => {
    for (const plot of plots) Plotly.react(plot, ...dressed(plot, theme, size), config);
  };
  const drawForScreen = () => draw(dark.matches ? "dark" : "light");

  try {
    const packed = Uint8Array.from(atob(document.getElementById("plotly-gzip").textContent), (c) => c.charCodeAt(0));
    const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(inflated).text();
    document.head.append(script);
    drawForScreen();
  } catch (error) {
    for (const plot of plots.filter((plot) => !plot.querySelector("svg"))) {
      plot.innerHTML = '<p class="failed">This browser could not draw the figure; the caption says what it shows.</p>';
    }
    throw error;
  }

  dark.addEventListener("change", drawForScreen);
  addEventListener("beforeprint", () => draw("light", { width: PRINT_WIDTH }));
  addEventListener("afterprint", drawForScreen);
})();
